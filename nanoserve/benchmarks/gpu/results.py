"""The files of a run: one for each part, and all of them together in the form in which results are committed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.benchmarks.report import Report, read_report
from nanoserve.errors import UsageError
from nanoserve.processes.files import replace_file

EXIT_OK, EXIT_DEVICE_LOST, EXIT_INTERRUPTED = 0, 4, 130
"""Of the process that measures a part: every case has its row; the device failed in a case that has its row, and only a
new process can go on; Ctrl-C."""
PARTS = ("correctness", "kernels", "engine")
TUNING = "tuning"
"""A part that is run alone, and whose rows are no results."""
TUNED_FILE = "configurations.py"
"""What comes of it."""
SCHEMA = "nanoserve-gpu/1"
_SAME_RUN = ("kind", "commit", "settings")

Document = Mapping[str, Any]


def part_file(directory: Path, part: str) -> Path:
    """Where a part's rows are."""
    return directory / f"{part}.json"


def part_kind(part: str) -> str:
    """What a part's report calls itself."""
    return f"gpu {part}"


def open_part(directory: Path, part: str, settings: dict[str, Any]) -> Report:
    """The report of a part, which goes on where an earlier run ended: what was skipped there is not done.

    Raises:
        UsageError: if the directory holds the part of another commit or of other settings: those would not mix.
        RuntimeFailure: if the file cannot be written.
    """
    path = part_file(directory, part)
    if not path.exists():
        return Report(part_kind(part), settings, path)
    earlier = read_report(path)
    report = Report(part_kind(part), settings, None)
    different = [name for name in _SAME_RUN if earlier.get(name) != report.document[name]]
    if different:
        raise UsageError(f"{path} holds results of another run ({', '.join(different)} differ); give another --out")
    report.document.update(earlier)
    report.rows[:] = [row for row in report.rows if "skipped" not in row]
    report.path = path
    return report


def read_results(path: Path) -> dict[str, Any]:
    """The parts' files of a directory together, or a file in which they were put together.

    Raises:
        UsageError: if there are none.
    """
    if not path.is_dir():
        return _read_together(path)
    parts = {part: read_report(part_file(path, part)) for part in PARTS if part_file(path, part).exists()}
    if not parts:
        raise UsageError(f"{path} holds none of {', '.join(f'{part}.json' for part in PARTS)}")
    first = next(iter(parts.values()))
    return {
        "schema": SCHEMA,
        "dry_run": any(document["settings"]["dry_run"] for document in parts.values()),
        "device": first.get("device", {}),
        "date": first["started"][:10],
        "commit": first["commit"],
        "versions": first["versions"],
        "parts": parts,
    }


def write_together(directory: Path) -> Path | None:
    """Put the parts' files together as `<gpu>-<date>.json`, beside them; None if there are none.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    if not any(part_file(directory, part).exists() for part in PARTS):
        return None
    results = read_results(directory)
    device = "dry-run" if results["dry_run"] else results["device"].get("name", "gpu")
    slug = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    path = directory / f"{slug}-{results['date']}.json"
    replace_file(path, json.dumps(results, indent=1) + "\n")
    return path


def _read_together(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path} is no result of nanoserve bench gpu ({SCHEMA})")
    return document
