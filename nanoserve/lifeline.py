"""A child process's tie to its parent: two pipes and a thread that does next to nothing.

Such are the engine process to its front end, and the workers to the engine. The parent holds the other ends. When its
end of the lifeline closes, however it died, the child is gone within moments, whatever it was doing: loading,
computing, waiting. The other way round the child writes a byte every ``HEARTBEAT_SECONDS``; silence means that it is
stopped, the end of the pipe that it is dead.
"""

import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from nanoserve.errors import RuntimeFailure

HEARTBEAT_SECONDS = 0.5
_SHARED_MEMORY = Path("/dev/shm")


class Lifeline:
    """Watches over this process in a thread of its own, which sleeps but for a beat now and then.

    The process must lead a process group: the whole group ends with the parent.

    Args:
        parent: descriptor that reads end-of-file when the parent is gone.
        pulse: descriptor that the heartbeats are written to.
        directory: removed with everything in it when the parent is gone, and so is its namesake in shared memory.
    """

    def __init__(self, parent: int, pulse: int, directory: Path) -> None:
        self._parent = parent
        self._pulse = pulse
        self._directory = directory
        os.set_blocking(pulse, False)  # a parent that hangs must not make the watch hang

    def start(self) -> None:
        """Give the first sign of life, a line, and begin to watch."""
        # A stopped group that loses its parent is sent SIGHUP, then SIGCONT. The second is enough: the watch goes on,
        # and cleans up.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            os.write(self._pulse, b"\n")
        except OSError:
            self._end()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def _watch(self) -> None:
        while True:
            readable, _, _ = select.select([self._parent], [], [], HEARTBEAT_SECONDS)
            if readable and not os.read(self._parent, 4096):
                break
            try:
                os.write(self._pulse, b".")
            except BlockingIOError:
                continue
            except OSError:
                break
        self._end()

    def _end(self) -> None:
        """No one is left to tell: leave nothing behind and stop in the middle of whatever goes on."""
        remove_directory(self._directory)
        os.killpg(0, signal.SIGKILL)  # with a compiler that may be at work for it


def own_pipes() -> tuple[int, int]:
    """Take stdin and stdout away from everyone else: children must not hold them open, libraries not write to them."""
    parent, pulse = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    return parent, pulse


def choose_directory() -> Path:
    """A name that nothing has, for a directory of a parent and its children.

    They are started with that name before the parent makes it: at any moment, whoever of them is killed, one is left
    that knows what to remove.

    Raises:
        RuntimeFailure: if there is no place for one.
    """
    try:
        return Path(tempfile.gettempdir()) / f"nanoserve-{secrets.token_hex(4)}"
    except OSError as error:
        raise _no_directory(error) from None


def make_directory(path: Path) -> None:
    """A new directory that only this user may enter.

    Raises:
        RuntimeFailure: if it cannot be made, or there is something of that name.
    """
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        if path.parent == _SHARED_MEMORY:
            raise RuntimeFailure(
                f"workers share memory in {_SHARED_MEMORY}, but nothing can be made there ({error.strerror}): mount it"
                " so that it can be written to"
            ) from None
        raise _no_directory(error) from None


def in_shared_memory(directory: Path) -> Path:
    """The namesake of a chosen directory where files are memory, for what is large and must be shared.

    Where there is no such place (macOS), it is within the directory; also where that is there itself (TMPDIR=/dev/shm).
    """
    apart = _SHARED_MEMORY.is_dir() and directory.parent != _SHARED_MEMORY
    return _SHARED_MEMORY / directory.name if apart else directory / "shared"


def remove_directory(directory: Path) -> None:
    """Remove a chosen directory and its namesake in shared memory, as far as there are such.

    They get another name first: whoever still works (a thread of this process, a compiler) could otherwise put a file
    into one that has just been emptied, and it would stay.
    """
    for each in (in_shared_memory(directory), directory):
        gone = each.with_name(f"{each.name}-gone")
        with suppress(OSError):
            each.rename(gone)
        for name in (gone, each):
            shutil.rmtree(name, ignore_errors=True)


def _no_directory(error: OSError) -> RuntimeFailure:
    return RuntimeFailure(
        f"no temporary directory can be made ({error.strerror}): set TMPDIR to a directory that can be written to"
    )


def read_line(descriptor: int, directory: Path) -> bytes:
    """What the parent says first, byte by byte, so that nothing behind it is swallowed.

    If the parent is gone, the process removes the directory that it perhaps has made, and ends.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            remove_directory(directory)
            sys.exit(0)
        line += byte
    return bytes(line)
