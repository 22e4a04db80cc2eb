"""One worker process as the engine sees it: started, watched, ended."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import msgspec

from nanoserve.processes.children import describe_exit, kill_group, python_command
from nanoserve.runtime.workers.messages import WorkerStart

GRACE_SECONDS = 2.0
"""For a process to end by itself before it is killed."""

_PROGRAM = "from nanoserve.runtime.workers.process import main; main()"


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
            python_command(_PROGRAM, str(directory)),
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
        return None if code is None or code >= 0 else describe_exit(code)

    def ending(self) -> str:
        """How it ended; to be asked of one that has."""
        return describe_exit(self._process.wait())

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
        kill_group(self._process.pid)
        self._process.wait()
