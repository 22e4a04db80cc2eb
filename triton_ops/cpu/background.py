"""Libraries that are built in the background, on first use, and loaded between two steps once they
are there."""

import logging
import os
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from pathlib import Path

from triton_ops.cpu.building import IN_BACKGROUND, NICEST, TIED, CannotBuild, Shelf

_LOG = logging.getLogger("nanoserve")
PATIENCE = 300.0
"""Seconds that a build may take while somebody waits for it: several times what it takes on a
machine of its own."""


class BackgroundLibrary(ABC):
    """A library that is loaded from a cache folder, or first built there by another process. That
    one outlives a command at a terminal, so that the next command finds what it makes; it ends with
    a server, and with a worker.

    Where it cannot be had, `problem` says why, in a notice that is logged once, and other code goes
    on doing its work.
    """

    without: str
    """Beginning of the notice; the reason follows it."""

    def __init__(self) -> None:
        self.loaded = False
        self.problem: str | None = None
        self._builder: subprocess.Popen[bytes] | None = None
        # a builder that is not waited for any more
        self._left: subprocess.Popen[bytes] | None = None
        self._waited_until: float | None = None

    @property
    @abstractmethod
    def shelf(self) -> Shelf:
        """Where it lies; asked for unless there is a problem already."""

    @abstractmethod
    def command(self) -> list[str]:
        """The process that fills the shelf; with `IN_BACKGROUND` behind it, it lets others go
        first."""

    @abstractmethod
    def open(self, library: Path) -> None:
        """Load the library. Raises OSError or RuntimeError if that fails."""

    @property
    def pending(self) -> bool:
        """Whether it is being built."""
        return self._builder is not None

    @property
    def expected(self) -> bool:
        """Whether it is loaded or being built."""
        return self.loaded or self.pending

    def load(self) -> bool:
        """Load it if it is there; whether it is loaded. One that does not load is a problem."""
        if not self.loaded and self.problem is None:
            try:
                self._load()
            except CannotBuild as reason:
                self.give_up(str(reason))
        return self.loaded

    def start(self, *, waited: bool = False) -> None:
        """Load it, or start to build it, unless that has been done or cannot be.

        Args:
            waited: nobody goes on without it. Its compiler is as urgent as this process, and
                replaces one that lets others go first; after `PATIENCE` this process does without
                the library.
        """
        if waited and self.pending and self._waited_until is None:
            self._end_builder()
        if self.expected or self.problem is not None:
            return
        self._waited_until = time.monotonic() + PATIENCE if waited else None
        try:
            if not self._load():
                self._build()
        except CannotBuild as reason:
            self.give_up(str(reason))

    def poll(self) -> bool:
        """Load what has been built meanwhile; whether it is loaded. Call it between steps only."""
        if self._builder is not None and self._builder.poll() is not None:
            self._builder = None
            try:
                if not self._load():
                    raise CannotBuild(f"the compiler failed ({self.shelf.reason})")
            except CannotBuild as reason:
                if self._waited_until is None:
                    # An answer may be streaming: the reason is kept, and told when the next process
                    # starts.
                    self.problem = str(reason)
                else:
                    self.give_up(str(reason))
        elif (
            self._builder is not None
            and self._waited_until is not None
            and time.monotonic() >= self._waited_until
        ):
            with suppress(OSError):  # from now on nobody waits for it
                os.setpriority(os.PRIO_PROCESS, self._builder.pid, NICEST)
            self._left, self._builder = self._builder, None
            self.give_up(
                f"the compiler is not done after {PATIENCE:g} s; a later run finds what it makes"
            )
        return self.loaded

    def wait(self) -> bool:
        """Wait for the build, for work that is long or timed, but not for ever; whether it is
        loaded."""
        if self.pending:
            self.start(waited=True)
        if self._builder is not None and self._waited_until is not None:
            with suppress(subprocess.TimeoutExpired):
                self._builder.wait(max(0.0, self._waited_until - time.monotonic()))
        return self.poll()

    def give_up(self, reason: str) -> None:
        """Keep the reason, and tell it."""
        self.problem = reason
        _LOG.warning("nanoserve: %s: %s", self.without, reason)

    def _load(self) -> bool:
        for library in self.shelf.whole_libraries():
            try:
                self.open(library)
            except (OSError, RuntimeError) as error:
                raise CannotBuild(f"{library} does not load ({error})") from error
            self.loaded = True
            return True
        return False

    def _end_builder(self) -> None:
        """It ends its compiler and removes what that has made."""
        assert self._builder is not None
        self._builder.terminate()
        self._builder.wait()
        self._builder = None

    def _build(self) -> None:
        if (failure := self.shelf.failure).exists():
            instead = f"another compiler is tried, or this one again if you delete {failure}"
            raise CannotBuild(f"the compiler failed ({self.shelf.reason}); {instead}")
        if not os.access(self.shelf.directory, os.W_OK | os.X_OK):
            raise CannotBuild(f"the cache folder {self.shelf.directory} cannot be written")
        nothing, outlives = subprocess.DEVNULL, _hears_the_terminal()
        words = [] if outlives else [TIED]
        if self._waited_until is None:
            words.append(IN_BACKGROUND)
        try:
            self._builder = subprocess.Popen(
                [*self.command(), *words],
                stdin=nothing if outlives else subprocess.PIPE,
                stdout=nothing,
                stderr=nothing,
                start_new_session=outlives,
                process_group=None if outlives else 0,
            )
        except OSError as error:
            raise CannotBuild(f"no process can be started ({error.strerror})") from error
        if self._waited_until is not None:
            _say_once(
                f"compiling for this model and machine, once; what takes more than {PATIENCE:g} s "
                "is left out"
            )


@cache
def _say_once(text: str) -> None:
    _LOG.warning("nanoserve: %s", text)


def _hears_the_terminal() -> bool:
    """Whether Ctrl-C reaches this process: it is a command at a terminal, not a server's engine, a
    worker or a job."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
