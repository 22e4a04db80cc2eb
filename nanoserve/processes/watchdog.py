"""A child process's tie to its parent: two pipes and a thread that does next to nothing.

Such are the engine process to its front end, and the workers to the engine. The parent holds the other ends. When its
end of the lifeline closes, however it died, the child is gone within moments, whatever it was doing: loading,
computing, waiting. The other way round the child writes a byte every ``HEARTBEAT_SECONDS``; silence means that it is
stopped, the end of the pipe that it is dead.
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
    """Watches over this process in a thread of its own, which sleeps but for a beat now and then.

    The process must lead a process group: the whole group ends with the parent.

    Args:
        parent: descriptor that reads end-of-file when the parent is gone.
        pulse: descriptor that the heartbeats are written to.
        directory: removed with everything in it when the parent is gone.
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
