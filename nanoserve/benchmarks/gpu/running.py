"""Runs the parts of ``bench gpu``, each in a child process: what hangs or dies costs one row.

The child is ``python -m nanoserve.benchmarks.gpu.running DIR PART SECONDS [--dry-run]``. Its exit codes are those of
`results`.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

from nanoserve.benchmarks.gpu.results import (
    EXIT_DEVICE_LOST,
    EXIT_INTERRUPTED,
    EXIT_OK,
    PARTS,
    TUNING,
    open_part,
    part_file,
    run_cases,
    write_together,
)
from nanoserve.benchmarks.report import read_report
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError

BUDGETS: Mapping[str, float] = {"correctness": 130.0, "kernels": 70.0, "engine": 230.0, TUNING: 480.0}
"""Seconds of each part; without tuning, and with every part's overtime, together less than eight minutes."""
CASE_SECONDS = 200.0
"""The longest that one case may take before its process is ended: compilers and other engines need most of it."""
OVERTIME_SECONDS = 15.0
"""The longest that a case may go on after the end of its part's budget."""
_POLL_SECONDS = 0.2
_FAREWELL_SECONDS = 20.0

_MODULES = {"correctness": "checks", "kernels": "kernels", "engine": "engine_rows", TUNING: "tuning"}
"""Modules whose `part_cases` gives the cases of a part. A child imports only its own: the kernels can be timed where
the engine's packages are missing."""

Command = Callable[[str, float], Sequence[str]]
"""The command line that measures a part within a number of seconds."""


def child_command(directory: Path, *, dry_run: bool) -> Command:
    """Python, running this module."""
    flags = ["--dry-run"] if dry_run else []
    return lambda part, seconds: [sys.executable, "-m", __name__, str(directory), part, f"{seconds:.1f}", *flags]


def run_parts(
    directory: Path,
    parts: Sequence[str],
    budgets: Mapping[str, float],
    *,
    dry_run: bool,
    command: Command | None = None,
    case_seconds: float = CASE_SECONDS,
) -> Path | None:
    """Run the parts one after another; the file in which the results of all parts were put together, if any.

    Args:
        command: measures a part; by default this module does.
        case_seconds: the longest that one case may take.

    Raises:
        UsageError: if the directory holds results of another run, or the child refuses to begin.
        RuntimeFailure: if a part ends between two cases, after the other parts were run.
    """
    settings = {"dry_run": dry_run}
    for part in parts:
        # Refused before anything is measured; and what an interrupted run was at is no longer going on.
        report = open_part(directory, part, settings)
        report.put("running", None)
        report.put("notes", [])
    children = _Children(directory, command or child_command(directory, dry_run=dry_run), settings, case_seconds)
    failures = []
    try:
        for part in parts:
            try:
                children.run(part, time.monotonic() + budgets[part])
            except RuntimeFailure as failure:
                failures.append(str(failure))
    finally:
        together = write_together(directory)
    if failures:
        raise RuntimeFailure("; ".join(failures))
    return together


class _Children:
    """Runs child processes for a part until one of them has come to its end."""

    def __init__(self, directory: Path, command: Command, settings: dict[str, bool], case_seconds: float) -> None:
        self._directory, self._command = directory, command
        self._settings, self._case_seconds = settings, case_seconds

    def run(self, part: str, deadline: float) -> None:
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # or transformers asks a hub for kernels, again and again
        while True:
            words = self._command(part, max(0.0, deadline - time.monotonic()))
            process = subprocess.Popen(words, env=offline)
            code, case, note = self._watch(part, process, deadline + OVERTIME_SECONDS)
            if code == EXIT_OK:
                return
            if code == UsageError.exit_code:
                raise UsageError(f"{part} was refused (see the line above)")
            if code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt
            if case is None and code != EXIT_DEVICE_LOST:
                ended = "took too long" if code is None else f"ended with exit code {code}"
                raise RuntimeFailure(f"{part}: the measuring process {ended} outside of any case")
            case = self._running(part)  # None if it had its row a moment before the process was ended
            report = open_part(self._directory, part, self._settings)
            if case is not None and note:  # a new process calls it skipped, and another run measures it
                report.note(f"{case}: {note}")
            elif case is not None:
                ended = "was ended: it took too long" if code is None else f"died (exit code {code})"
                report.add({"case": case, "error": f"its process {ended}"})
            report.put("running", None)

    def _watch(
        self, part: str, process: "subprocess.Popen[bytes]", until: float
    ) -> tuple[int | None, str | None, str | None]:
        """Wait for its end, and bring it about if a case takes too long, or goes on after `until`.

        Returns the exit code, which is None if the process had to be ended; the case that ran last; and a note if only
        the budget cut that case off.
        """
        case, began = self._running(part), time.monotonic()
        try:
            while (code := _ended(process, _POLL_SECONDS)) is None:
                now, running = time.monotonic(), self._running(part)
                if running != case:
                    case, began = running, now
                elif now > began + self._case_seconds:
                    return None, case, None
                elif case is not None and now > until:  # what has not begun yet, or is putting away, is no case
                    return None, case, f"cut off after {now - began:.0f} s, as the time budget was spent"
            return code, self._running(part), None
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _ended(process, _FAREWELL_SECONDS)
            raise
        finally:
            process.kill()  # without effect on one that ended; and a kernel that hangs hears nothing gentler
            process.wait()

    def _running(self, part: str) -> str | None:
        """The case that has begun and has no row."""
        path = part_file(self._directory, part)
        report = read_report(path) if path.exists() else {}
        name = report.get("running")
        return name if isinstance(name, str) and all(row["case"] != name for row in report["rows"]) else None


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit code if the process ends within ``seconds`` seconds; else None."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


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


def main() -> int:
    """The child: read the command line, measure, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("part", choices=(*PARTS, TUNING))
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    try:
        done = measure_part(asked.directory, asked.part, seconds=asked.seconds, dry_run=asked.dry_run)
    except NanoserveError as error:
        print(f"nanoserve: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK if done else EXIT_DEVICE_LOST


if __name__ == "__main__":
    sys.exit(main())
