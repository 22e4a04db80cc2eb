"""One worker process as the engine sees it: started, watched, ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from nanoserve.runtime.workers.messages import WorkerStart

GRACE_SECONDS = 2.0
"""For a process to end by itself before it is killed."""

# Where nanoserve itself is: an editable installation is found by a hook of the site, not on the path.
_PACKAGES = str(Path(__file__).parents[3])
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nanoserve.runtime.workers.process import main; main()"
)


class WorkerChild:
    """A process that runs a worker; it lives as long as this process holds its pipes, and no longer.

    Args:
        directory: a name from `choose_directory`; it is removed with everything in it when this process is gone.

    Raises:
        OSError: if it cannot be started.
    """

    def __init__(self, rank: int, threads: int, directory: Path) -> None:
        """It waits for `begin`."""
        self.rank = rank
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps([_PACKAGES, *sys.path]), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            process_group=0,  # Ctrl-C is for the engine, which then ends its workers
        )

    def begin(self, start: WorkerStart) -> None:
        """Tell it what it is; one that has died meanwhile does not hear it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(start) + b"\n")
            self._process.stdin.flush()

    @property
    def pulse(self) -> int:
        """Descriptor of its heartbeats, which ends with it."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def beats(self) -> bool:
        """Whether it gave a sign of life, once its pulse is readable; if not, it is dead."""
        return bool(os.read(self.pulse, 65536))

    def killed(self) -> str | None:
        """By which signal it died; None if it lives or ended by itself."""
        code = self._process.poll()
        return None if code is None or code >= 0 else _ending(code)

    def ending(self) -> str:
        """How it ended; to be asked of one that has."""
        return _ending(self._process.wait())

    def let_go(self) -> None:
        """Let go of it: it ends itself and all that it has started, or is killed."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def wait(self, until: float) -> None:
        """Until it is gone: by itself at best, else killed at that monotonic time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left; macOS: none but the dead
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
