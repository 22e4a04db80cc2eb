"""A child process that ends with its parent: two pipes and a thread.

The engine process is tied to its front end like this, and the workers to the engine. The parent holds the other ends of
the pipes. When its end of the first pipe closes, however it died, the child ends within moments, whether it is loading,
computing or waiting. Over the second pipe, the child writes a byte every ``HEARTBEAT_SECONDS``: silence means that it
is stopped, the end of the pipe that it is dead.
"""

import os
import select
import signal
import sys
import threading
from pathlib import Path

from nanoserve.processes.temporary import remove_directory

HEARTBEAT_SECONDS = 0.5


class ParentWatchdog:
    """A thread that ends this process when its parent is gone, and writes heartbeats.

    The process must lead a process group: the whole group ends with the parent.

    Args:
        parent: descriptor that reads end-of-file when the parent is gone.
        pulse: descriptor for the heartbeats.
        directory: removed with its content when the parent is gone.
    """

    def __init__(self, parent: int, pulse: int, directory: Path) -> None:
        self._parent = parent
        self._pulse = pulse
        self._directory = directory
        os.set_blocking(pulse, False)  # a parent that hangs must not block the thread

    def start(self) -> None:
        """Write the first heartbeat, a line, and start the thread."""
        # A stopped group that loses its parent gets SIGHUP, then SIGCONT. SIGHUP is ignored, so that this thread runs
        # on and cleans up.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            os.write(self._pulse, b"\n")
        except OSError:
            self._end()
        threading.Thread(target=self._watch, name="parent-watchdog", daemon=True).start()

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
        """Remove the directory and kill the process group at once."""
        remove_directory(self._directory)
        os.killpg(0, signal.SIGKILL)  # a running compiler included


def own_pipes() -> tuple[int, int]:
    """Private copies of stdin and stdout: children must not hold them open, and libraries must not write to them."""
    parent, pulse = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    os.close(nowhere)
    return parent, pulse


def read_line(descriptor: int, directory: Path) -> bytes:
    """A line from the parent, read byte by byte, so that nothing after it is consumed.

    If the parent is gone, the process removes the directory that the parent may have made, and ends.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            remove_directory(directory)
            sys.exit(0)
        line += byte
    return bytes(line)
