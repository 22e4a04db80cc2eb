"""Runs the parts, each in a process of its own, and watches them: what hangs or dies costs one row."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
"""Seconds of each part; without tuning, together less than eight minutes. A case that has begun may end."""
CASE_SECONDS = 200.0
"""The longest that one case may take before its process is ended: compilers and other engines need most of it."""
OVERTIME_SECONDS = 60.0
"""The longest that a case may go on behind the end of its part's budget."""
_POLL_SECONDS = 0.2
_FAREWELL_SECONDS = 20.0

Command = Callable[[str, float], Sequence[str]]
"""The words that measure a part within so many seconds."""


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
            open_part(self._directory, part, self._settings).put("running", None)
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
            until = time.monotonic() + left + OVERTIME_SECONDS
            code = self._watch(part, subprocess.Popen(self._command(part, left), env=offline), until)
            if code == EXIT_OK:
                return
            if code == UsageError.exit_code:
                raise UsageError(f"{part} was refused (see the line above)")
            if code == EXIT_INTERRUPTED:
                raise KeyboardInterrupt
            if not self._blame(part, code) and code != EXIT_DEVICE_LOST:
                ended = "took too long" if code is None else f"ended with exit code {code}"
                raise RuntimeFailure(f"{part}: the measuring process {ended} outside of any case")

    def _watch(self, part: str, process: "subprocess.Popen[bytes]", until: float) -> int | None:
        """The exit code; None if a case took too long and the process was ended."""
        case, began = self._running(part), time.monotonic()
        try:
            while (code := _ended(process, _POLL_SECONDS)) is None:
                if (now_running := self._running(part)) != case:
                    case, began = now_running, time.monotonic()
                elif time.monotonic() > min(until, began + self._case_seconds):
                    return None
            return code
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _ended(process, _FAREWELL_SECONDS)
            raise
        finally:
            process.kill()  # without effect on one that ended; and a kernel that hangs hears nothing gentler
            process.wait()

    def _running(self, part: str) -> str | None:
        path = part_file(self._directory, part)
        name = read_report(path).get("running") if path.exists() else None
        return name if isinstance(name, str) else None

    def _blame(self, part: str, code: int | None) -> bool:
        """Write the row of the case in which the process ended; False if there was none."""
        report = open_part(self._directory, part, self._settings)
        case = self._running(part)
        if case is None or any(row["case"] == case for row in report.rows):
            return False
        ended = "was ended: it took too long" if code is None else f"died (exit code {code})"
        report.add({"case": case, "error": f"its process {ended}"})
        return True


def _ended(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit code if the process ends within so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
