"""A child process that ends with its parent: two pipes, and in the child a thread.

The engine process is tied to its front end like this, the workers to the engine, and servers and
peers to a benchmark. When the parent's end of the first pipe closes, however it died, the child
ends within moments, whether it is loading, computing or waiting. Over the second pipe, the child
writes a byte every ``HEARTBEAT_SECONDS``: silence means that it is stopped, the end of the pipe
that it is dead.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from nanoserve.utils.children import GRACE_SECONDS, python_command, send_line
from nanoserve.utils.temporary import remove_abandoned, remove_directories, remove_directory

HEARTBEAT_SECONDS = 0.5


class TiedChild:
    """The parent's side: a process that lives as long as this process holds its pipes, and no
    longer.

    `program` is Python code that begins with a `ParentWatchdog`; `words` are its sys.argv[3:].
    `directory` is a name from `choose_directory`, and the child removes it when this process is
    gone. `environment` is all of the child's variables, and `descriptors` are open files that it
    inherits. Raises OSError if it cannot start.
    """

    def __init__(
        self,
        program: str,
        *words: str,
        directory: Path | None = None,
        environment: Mapping[str, str] = os.environ,
        descriptors: Sequence[int] = (),
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            python_command(program, str(directory or ""), *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            pass_fds=descriptors,
            process_group=0,  # Ctrl-C is for the parent, which then ends its children
        )

    def tell(self, line: bytes) -> None:
        send_line(self.process, line)

    @property
    def pulse(self) -> int:
        """Descriptor of the child's heartbeats, which ends with the child."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def beats(self) -> bool:
        """Read the pulse once it is readable. Returns False if the child is dead."""
        return bool(os.read(self.pulse, 65536))

    def ending(self) -> str:
        """Wait for the child's end and describe it in words."""
        code = self.process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"

    def let_go(self) -> None:
        """Close its pipes: it kills itself and all that it has started."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def end(self, seconds: float = 0.0) -> None:
        """Wait for its end for this time, then kill it and all that it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, seconds))
        # With the group: a compiler, for example, would outlive it.
        # no process is left; on macOS: only dead ones
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.let_go()


def end_children(
    children: Collection[TiedChild], directory: Path | None, seconds: float = GRACE_SECONDS
) -> None:
    """Let all children go, and kill the children that still live after this time. Remove their
    directory, and the directories that they have made beside it."""
    for child in children:
        child.let_go()
    until = time.monotonic() + seconds
    for child in children:
        child.end(until - time.monotonic())
    remove_directory(directory)
    if directory is not None:
        remove_abandoned(directory.parent)  # a killed child could not remove its own


class LoggedChild(TiedChild):
    """A child whose stderr is kept, and whose stdout is lost. Its program need not begin with a
    watchdog."""

    def __init__(
        self,
        program: str,
        *words: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the child)
        program = f"from {__name__} import follow_parent; follow_parent(); {program}"
        super().__init__(
            program, *words, environment=environment, descriptors=descriptors, stderr=self._log
        )

    @property
    def lines(self) -> list[str]:
        """The lines that it has written to stderr."""
        # not seek and read: the child writes at the position of the same file
        descriptor = self._log.fileno()
        written = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return written.decode(errors="replace").strip().splitlines()

    def last_words(self) -> str:
        """The last line of its stderr, or its exit code; waits for its end."""
        self.end(GRACE_SECONDS)
        lines = self.lines
        if not lines:
            return f"exit code {self.process.returncode}"
        return lines[-1]


def follow_parent() -> None:
    """Tie this process to the `LoggedChild` that started it."""
    ParentWatchdog.of_this_process().start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # only stderr is kept


class ParentWatchdog:
    """The child's side: a thread that writes heartbeats. When the parent ends, it kills the process
    group that this process leads, and the groups that its own dead children led.

    The descriptor `parent` reads end-of-file when the parent is gone. Then `directory` is removed
    with its content, and so are the directories that this process has made.
    """

    def __init__(self, parent: int, pulse: int, directory: Path | None) -> None:
        self._parent = parent
        self._pulse = pulse
        self.directory = directory
        os.set_blocking(pulse, False)  # a parent that hangs must not block the thread

    @classmethod
    def of_this_process(cls) -> Self:
        """The watchdog of a process that a `TiedChild` started."""
        # Private copies of stdin and stdout: children must not hold them open, and libraries must
        # not write to them.
        parent, pulse = os.dup(0), os.dup(1)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.dup2(2, 1)
        os.close(nowhere)
        directory = None
        if sys.argv[2]:
            directory = Path(sys.argv[2])
        return cls(parent, pulse, directory)

    def read_line(self) -> bytes:
        """A line from the parent. If that is gone, the process removes the directory and ends."""
        line = bytearray()
        while not line.endswith(b"\n"):
            byte = os.read(self._parent, 1)  # nothing after the line must be consumed
            if not byte:
                remove_directory(self.directory)
                sys.exit(0)
            line += byte
        return bytes(line)

    def start(self) -> None:
        """Start the thread, which writes the first heartbeat at once."""
        # A stopped group that loses its parent gets SIGHUP, then SIGCONT: the thread must survive
        # to clean up.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="parent-watchdog", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # the parent has closed the pulse
            while True:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._pulse, b".")
                readable, _, _ = select.select([self._parent], [], [], HEARTBEAT_SECONDS)
                if readable and not os.read(self._parent, 4096):
                    break
        remove_directory(self.directory)
        for group in _groups_of_dead_children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        remove_directories()
        os.killpg(0, signal.SIGKILL)  # a running compiler included


def _groups_of_dead_children() -> list[int]:
    """The process groups of dead children that were not waited for, on Linux. A living child ends
    its own group when this process is gone; a child that was killed cannot."""
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        for process in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):  # another thread has just waited for it
                state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
                if state == "Z" and os.getpgid(process) == process:
                    found.append(process)
    return found
