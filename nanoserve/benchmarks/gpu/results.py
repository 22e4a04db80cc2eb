"""The cases of a part of the run and the files that their rows go to, one for each part and one with all of them.

A case becomes a row on disk as it ends, whatever becomes of the next one.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.benchmarks.report import Report, read_report
from nanoserve.errors import NanoserveError, UsageError
from nanoserve.processes.files import replace_file

EXIT_OK, EXIT_DEVICE_LOST, EXIT_INTERRUPTED = 0, 4, 130
"""Exit codes of the process that measures a part: every case has its row; the device failed in a case that has its row,
and only a new process can go on; Ctrl-C."""
PARTS = ("correctness", "kernels", "engine")
TUNING = "tuning"
"""A part that is run alone, and whose rows are no results."""
TUNED_FILE = "configurations.py"
"""The file that tuning writes."""
SCHEMA = "nanoserve-gpu/1"
_SAME_RUN = ("kind", "commit", "settings")

Document = Mapping[str, Any]


def part_file(directory: Path, part: str) -> Path:
    """File that holds a part's rows."""
    return directory / f"{part}.json"


def open_part(directory: Path, part: str, settings: dict[str, Any]) -> Report:
    """The report of a part, which goes on where an earlier run ended: what was skipped there is not done.

    Raises:
        UsageError: if the directory holds the part of another commit or of other settings: those would not mix.
        RuntimeFailure: if the file cannot be written.
    """
    path, kind = part_file(directory, part), f"gpu {part}"
    if not path.exists():
        return Report(kind, settings, path)
    earlier = read_report(path)
    report = Report(kind, settings, None)
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
        return read_report(path, schema=SCHEMA, content="a result of nanoserve bench gpu")
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


_LONGEST_REASON = 300


class CannotRun(Exception):
    """Something cannot do this work here, such as a peer that is not installed; the message says why."""


@dataclass(frozen=True, slots=True)
class GpuCase:
    """Something to measure or to check, and how; `measure` gives the fields of its row."""

    name: str
    measure: Callable[[], dict[str, Any]]


def run_cases(
    cases: Iterable[GpuCase],
    report: Report,
    *,
    seconds: float,
    device_works: Callable[[], bool],
    announce: Callable[[str], None],
) -> bool:
    """Measure what has no row yet; True if all of it has one now.

    The report says at any time which case is `running`. A case that fails has the reason as its row's `error`; once
    the budget of `seconds` is spent, the others are `skipped`. False means that the device no longer works, which
    only a new process can mend.
    """
    deadline = time.monotonic() + seconds
    known = {row["case"] for row in report.rows}
    for case in cases:
        if case.name in known:
            continue
        if time.monotonic() > deadline:
            report.add({"case": case.name, "skipped": "the time budget was spent"})
            continue
        announce(case.name)
        report.put("running", case.name)
        began = time.monotonic()
        fields = _measured(case)
        known.add(case.name)
        report.add({"case": case.name, "seconds": round(time.monotonic() - began, 2), **fields})
        if "error" in fields and not device_works():
            return False
    report.put("running", None)
    report.finish()
    return True


def _measured(case: GpuCase) -> dict[str, Any]:
    try:
        return case.measure()
    except CannotRun as absence:
        return {"skipped": str(absence)}
    except Exception as error:  # whatever a kernel, a compiler or a peer fails with belongs to this case alone
        return {"error": reason(error)}


def reason(error: BaseException) -> str:
    """One line for a row."""
    text = " ".join(str(error).split())
    name = "" if isinstance(error, NanoserveError) else f"{type(error).__name__}: "
    return (name + text)[:_LONGEST_REASON]
