"""The engine process's tie to its front end: two pipes and a thread that does next to nothing.

The front end holds the other ends. When its end of the lifeline closes, however it died, the engine process is gone
within moments, whatever it was doing: loading, computing, waiting. The other way round the engine writes a byte every
``HEARTBEAT_SECONDS``; silence means that it is stopped, the end of the pipe that it is dead.
"""

import os
import select
import shutil
import signal
import threading
from pathlib import Path

HEARTBEAT_SECONDS = 0.5


class Lifeline:
    """Watches over this process in a thread of its own, which sleeps but for a beat now and then.

    The process must lead a process group: the whole group ends with the front end.

    Args:
        parent: descriptor that reads end-of-file when the front end is gone.
        pulse: descriptor that the heartbeats are written to.
        directory: removed with everything in it when the front end is gone.
    """

    def __init__(self, parent: int, pulse: int, directory: Path) -> None:
        self._parent = parent
        self._pulse = pulse
        self._directory = directory
        os.set_blocking(pulse, False)  # a front end that hangs must not make the watch hang

    def start(self) -> None:
        """Tell the front end the directory's name, as the first line on the pulse, and begin to watch."""
        # A stopped group that loses its parent is sent SIGHUP, then SIGCONT. The second is enough: the watch goes on,
        # and cleans up.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            os.write(self._pulse, os.fsencode(self._directory) + b"\n")
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
        shutil.rmtree(self._directory, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # with a compiler that may be at work for this engine
