"""Loading the CPU operators, now or when they are built; until then plain torch does their work."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from triton_ops.cpu import building
from triton_ops.cpu.building import Job
from triton_ops.cpu.toolchain import CannotBuild, make_job

RETRY_AFTER = 24 * 3600.0
"""Seconds for which a compiler that failed is not tried again."""


class CpuOperators:
    """The C++ operators of this process.

    Created, it loads them from the cache or, if they are not there, starts to build them in a process of its own that
    outlives this one. `poll` loads them when they are ready. Where they cannot be had, `problem` says why, in a notice
    that has been logged once, and plain torch goes on doing the work.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.loaded = False
        self.problem: str | None = None
        self._builder: subprocess.Popen[bytes] | None = None
        try:
            self._job = make_job(os.environ if environment is None else environment)
            if not self._load():
                self._start(self._job)
        except CannotBuild as reason:
            self._give_up(str(reason))

    @property
    def expected(self) -> bool:
        """Whether they are loaded or being built."""
        return self.loaded or self._builder is not None

    def poll(self) -> bool:
        """Load the operators if they have been built meanwhile; whether they are loaded. Call it between steps only."""
        if self._builder is not None and self._builder.poll() is not None:
            self._builder = None
            try:
                if not self._load():
                    raise CannotBuild(_failure(self._job))
            except CannotBuild as reason:
                # An answer may be streaming: the reason is kept, and told when the next process starts.
                self.problem = str(reason)
        return self.loaded

    def wait(self) -> bool:
        """Wait for the build, for work that is long or timed; whether the operators are loaded."""
        if self._builder is not None:
            self._builder.wait()
            self.poll()
            if self.problem is not None:
                self._give_up(self.problem)
        return self.loaded

    def _load(self) -> bool:
        """Load a whole library from the cache, if there is one. Raises CannotBuild if it does not load."""
        for library in self._job.whole_libraries():
            try:
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            except (OSError, RuntimeError) as error:
                raise CannotBuild(f"{library} does not load ({error})") from error
            self.loaded = True
            return True
        return False

    def _start(self, job: Job) -> None:
        if _failed_lately(job.failure):
            raise CannotBuild(f"{_failure(job)}; it is tried again tomorrow, or now if you delete {job.failure}")
        if not os.access(job.directory, os.W_OK | os.X_OK):
            raise CannotBuild(f"the cache folder {job.directory} cannot be written")
        command = [sys.executable, "-I", building.__file__, job.to_json()]
        nothing = subprocess.DEVNULL
        try:
            self._builder = subprocess.Popen(
                command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
            )
        except OSError as error:
            raise CannotBuild(f"no process can be started ({error.strerror})") from error

    def _give_up(self, reason: str) -> None:
        self.problem = reason
        logging.getLogger("nanoserve").warning("nanoserve: plain torch is used, which is slower: %s", reason)


@cache
def cpu_operators() -> CpuOperators:
    """The operators of this process: torch knows one set of them, so there is one."""
    return CpuOperators()


def _failed_lately(failure: Path) -> bool:
    try:
        return time.time() - failure.stat().st_mtime < RETRY_AFTER
    except OSError:
        return False


def _failure(job: Job) -> str:
    try:
        reason = " ".join(job.failure.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        reason = "it was ended"
    return f"the compiler {job.compile[0]} failed ({reason})"
