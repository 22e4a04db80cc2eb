"""The parts of ``bench gpu``, each measured by a child process: what hangs or dies costs one row.

A case becomes a row on disk as it ends, whatever becomes of the next one. The rows of each part go to a file, and in
the end all of them to one file.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from nanoserve.benchmarks.report import Report, read_report
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.processes.files import replace_file

_EXIT_OK, _EXIT_DEVICE_LOST, _EXIT_INTERRUPTED = 0, 4, 130
"""Exit codes of a child: every case has its row; the device failed in a case that has its row, and only a new process
can go on; Ctrl-C."""
PARTS = ("correctness", "kernels", "engine")
TUNING = "tuning"
"""A part that is run alone, and whose rows are no results."""
TUNED_FILE = "configurations.py"
"""The file that tuning writes."""
SCHEMA = "nanoserve-gpu/1"
_SAME_RUN = ("kind", "commit", "settings")

BUDGETS: Mapping[str, float] = {"correctness": 130.0, "kernels": 70.0, "engine": 230.0, TUNING: 480.0}
"""Seconds of each part; without tuning, and with every part's overtime, together less than eight minutes."""
CASE_SECONDS = 200.0
"""The longest that one case may take before its process is ended: compilers and other engines need most of it."""
OVERTIME_SECONDS = 15.0
"""The longest that a case may go on after the end of its part's budget."""
_POLL_SECONDS = 0.2
_FAREWELL_SECONDS = 20.0
_LONGEST_REASON = 300

_MODULES = {"correctness": "checks", "kernels": "kernels", "engine": "engine_rows", TUNING: "tuning"}
"""Modules whose `part_cases` gives the cases of a part. A child imports only its own: the kernels can be timed where
the engine's packages are missing."""

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


def measure_part(directory: Path, part: str, *, seconds: float, dry_run: bool) -> bool:
    """Go on with a part until all of its cases have rows, or until its budget is spent; False if the device failed.

    The budget of `seconds` begins here: to import torch, to open the device and to measure its limits is part of it.

    Raises:
        UsageError: without a GPU, or if the directory holds something else.
        RuntimeFailure: if the rows cannot be written.
    """
    began = time.monotonic()
    from nanoserve.benchmarks.gpu.setting import find_setting

    setting = find_setting(dry_run=dry_run)
    report = open_part(directory, part, {"dry_run": dry_run})
    report.put("device", setting.facts())
    cases = import_module(f"nanoserve.benchmarks.gpu.{_MODULES[part]}").part_cases
    with ExitStack() as stack:
        return run_cases(
            cases(setting, report, stack),
            report,
            seconds=seconds - (time.monotonic() - began),
            device_works=setting.give_back,
            announce=lambda name: print(f"{part}: {name}", file=sys.stderr, flush=True),
        )


def _run_child(measure: Callable[..., bool], directory: Path, part: str, *, seconds: float, dry_run: bool) -> None:
    """The child: measure, and exit with what became of it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # The command's module, which a child imports too, ends a process without the clean-up that Ctrl-C needs here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_HUB_OFFLINE"] = "1"  # or transformers asks a hub for kernels, again and again
    try:
        done = measure(directory, part, seconds=seconds, dry_run=dry_run)
    except NanoserveError as error:
        print(f"nanoserve: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    sys.exit(_EXIT_OK if done else _EXIT_DEVICE_LOST)


def run_parts(
    directory: Path,
    parts: Sequence[str],
    budgets: Mapping[str, float],
    *,
    dry_run: bool,
    measure: Callable[..., bool] = measure_part,
    case_seconds: float = CASE_SECONDS,
) -> Path | None:
    """Run the parts one after another; the file in which the results of all parts were put together, if any.

    Args:
        measure: is called in a child process with the arguments of `measure_part`.
        case_seconds: the longest that one case may take.

    Raises:
        UsageError: if the directory holds results of another run, or the child refuses to begin.
        RuntimeFailure: if a part ends between two cases, after the other parts were run.
    """
    for part in parts:
        # Refused before anything is measured; and what an interrupted run was at is no longer going on.
        report = open_part(directory, part, {"dry_run": dry_run})
        report.put("running", None)
        report.put("notes", [])
    failures = []
    try:
        for part in parts:
            deadline = time.monotonic() + budgets[part]
            try:
                while not _run_once(directory, part, deadline, measure, case_seconds, dry_run=dry_run):
                    pass
            except RuntimeFailure as failure:
                failures.append(str(failure))
    finally:
        together = write_together(directory)
    if failures:
        raise RuntimeFailure("; ".join(failures))
    return together


def _run_once(
    directory: Path, part: str, deadline: float, measure: Callable[..., bool], case_seconds: float, *, dry_run: bool
) -> bool:
    """Run a child; whether the part came to its end. If not, the case that the child was at has its row now."""
    settings = {"seconds": max(0.0, deadline - time.monotonic()), "dry_run": dry_run}
    make_process = multiprocessing.get_context("spawn").Process
    process = make_process(target=_run_child, args=(measure, directory, part), kwargs=settings)
    process.start()
    code, case, note = _watch(process, part_file(directory, part), deadline + OVERTIME_SECONDS, case_seconds)
    if code == _EXIT_OK:
        return True
    if code == UsageError.exit_code:
        raise UsageError(f"{part} was refused (see the line above)")
    if code == _EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if case is None and code != _EXIT_DEVICE_LOST:
        ended = "took too long" if code is None else f"ended with exit code {code}"
        raise RuntimeFailure(f"{part}: the measuring process {ended} outside of any case")
    case = _running(part_file(directory, part))  # None if it had its row a moment before the process was ended
    report = open_part(directory, part, {"dry_run": dry_run})
    if case is not None and note:  # a new process calls it skipped, and another run measures it
        report.note(f"{case}: {note}")
    elif case is not None:
        ended = "was ended: it took too long" if code is None else f"died (exit code {code})"
        report.add({"case": case, "error": f"its process {ended}"})
    report.put("running", None)
    return False


def _watch(
    process: SpawnProcess, path: Path, until: float, case_seconds: float
) -> tuple[int | None, str | None, str | None]:
    """Wait for its end, and bring it about if a case takes too long, or goes on after `until`.

    Returns the exit code, which is None if the process had to be ended; the case that ran last; and a note if only the
    budget cut that case off.
    """
    case, began = _running(path), time.monotonic()
    try:
        while process.exitcode is None:
            process.join(_POLL_SECONDS)
            now, running = time.monotonic(), _running(path)
            if process.exitcode is not None or running != case:
                case, began = running, now
            elif now > began + case_seconds:
                return None, case, None
            elif case is not None and now > until:  # what has not begun yet, or is putting away, is no case
                return None, case, f"cut off after {now - began:.0f} s, as the time budget was spent"
        return process.exitcode, _running(path), None
    except KeyboardInterrupt:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
        process.join(_FAREWELL_SECONDS)
        raise
    finally:
        process.kill()  # without effect on one that ended; and a kernel that hangs hears nothing gentler
        process.join()


def _running(path: Path) -> str | None:
    """The case that has begun and has no row."""
    report = read_report(path) if path.exists() else {}
    name = report.get("running")
    return name if isinstance(name, str) and all(row["case"] != name for row in report["rows"]) else None
