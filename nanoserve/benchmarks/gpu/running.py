"""Runs the parts, each in a process of its own, and watches them: what hangs or dies costs one row."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoserve.benchmarks.gpu.results import (
    EXIT_DEVICE_LOST,
    EXIT_INTERRUPTED,
    EXIT_OK,
    TUNING,
    open_part,
    part_file,
    write_together,
)
from nanoserve.benchmarks.report import read_report
from nanoserve.errors import RuntimeFailure, UsageError

BUDGETS: Mapping[str, float] = {"correctness": 130.0, "kernels": 70.0, "engine": 230.0, TUNING: 480.0}
"""Seconds of each part; without tuning, and with every part's overtime, together less than eight minutes."""
CASE_SECONDS = 200.0
"""The longest that one case may take before its process is ended: compilers and other engines need most of it."""
OVERTIME_SECONDS = 15.0
"""The longest that a case may go on after the end of its part's budget."""
_POLL_SECONDS = 0.2
_FAREWELL_SECONDS = 20.0

Command = Callable[[str, float], Sequence[str]]
"""The command line that measures a part within a number of seconds."""


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a measuring process ended."""

    code: int | None
    """None if it was ended because it took too long."""
    case: str | None
    """That was being measured; None if there was none."""
    seconds: float = 0.0
    """Since that case began."""
    cut_off: bool = False
    """Ended because the budget was spent, before the case took too long by itself."""


def worker_command(directory: Path, *, dry_run: bool) -> Command:
    """Python, running the worker."""

    def words(part: str, seconds: float) -> Sequence[str]:
        module = "nanoserve.benchmarks.gpu.worker"
        flags = ["--dry-run"] if dry_run else []
        return [sys.executable, "-m", module, str(directory), part, f"{seconds:.1f}", *flags]

    return words


class PartRunner:
    """Runs parts into a directory.

    Args:
        command: what measures a part.
        case_seconds: the longest that one case may take.
    """

    def __init__(self, directory: Path, command: Command, *, dry_run: bool, case_seconds: float = CASE_SECONDS) -> None:
        self._directory = directory
        self._command = command
        self._settings = {"dry_run": dry_run}
        self._case_seconds = case_seconds

    def run(self, parts: Sequence[str], budgets: Mapping[str, float]) -> Path | None:
        """The parts one after another; the file in which the results of all parts were put together, if any.

        Raises:
            UsageError: if the directory holds results of another run, or the worker refuses to begin.
            RuntimeFailure: if a part ends between two cases, after the other parts were run.
        """
        for part in parts:
            # Refused before anything is measured; and what an interrupted run was at is no longer going on.
            report = open_part(self._directory, part, self._settings)
            report.put("running", None)
            report.put("notes", [])
        failures = []
        try:
            for part in parts:
                try:
                    self._run_part(part, budgets[part])
                except RuntimeFailure as failure:
                    failures.append(str(failure))
        finally:
            together = write_together(self._directory)
        if failures:
            raise RuntimeFailure("; ".join(failures))
        return together

    def _run_part(self, part: str, budget: float) -> None:
        deadline = time.monotonic() + budget
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # or transformers asks a hub for kernels, again and again
        while True:
            left = max(0.0, deadline - time.monotonic())
            process = subprocess.Popen(self._command(part, left), env=offline)
            ending = self._watch(part, process, deadline + OVERTIME_SECONDS)
            if ending.code == EXIT_OK:
                return
            if ending.code == UsageError.exit_code:
                raise UsageError(f"{part} was refused (see the line above)")
            if ending.code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt
            if ending.case is None and ending.code != EXIT_DEVICE_LOST:
                ended = "took too long" if ending.code is None else f"ended with exit code {ending.code}"
                raise RuntimeFailure(f"{part}: the measuring process {ended} outside of any case")
            self._take_note(part, ending)

    def _watch(self, part: str, process: "subprocess.Popen[bytes]", until: float) -> _Ending:
        """Wait for its end, and bring it about if a case takes too long, or goes on after `until`."""
        case, began = self._running(part), time.monotonic()
        try:
            while (code := _ended(process, _POLL_SECONDS)) is None:
                now, now_running = time.monotonic(), self._running(part)
                if now_running != case:
                    case, began = now_running, now
                elif now > began + self._case_seconds:
                    return _Ending(None, case, now - began)
                elif case is not None and now > until:  # what has not begun yet, or is putting away, is no case
                    return _Ending(None, case, now - began, cut_off=True)
            return _Ending(code, self._running(part))
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

    def _take_note(self, part: str, ending: _Ending) -> None:
        """Keep a row for the case in which a process ended, or only a remark if the budget cut it off.

        A new process calls what was cut off skipped, like all that is left then, and another run measures it.
        """
        case = self._running(part)  # None if it had its row a moment before the process was ended
        report = open_part(self._directory, part, self._settings)
        if case is not None and ending.cut_off:
            report.note(f"{case}: cut off after {ending.seconds:.0f} s, as the time budget was spent")
        elif case is not None:
            ended = "was ended: it took too long" if ending.code is None else f"died (exit code {ending.code})"
            report.add({"case": case, "error": f"its process {ended}"})
        report.put("running", None)


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit code if the process ends within so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
