"""A worker process, from its first line of input on.

The tie to its parent is there before torch is imported.
"""

import os
import sys
from pathlib import Path

from nanoserve.executor.workers.endpoint import WorkerEndpoint
from nanoserve.executor.workers.messages import Hello, WorkerFailed, WorkerStart
from nanoserve.utils.watchdog import ParentWatchdog, TiedChild

_PROGRAM = "from nanoserve.executor.workers.process import main; main()"
_SWITCH_SECONDS = 0.0002
"""How long one of a worker's two threads may keep the interpreter when the other wants it. With
Python's 5 ms, a loop that has only just let go of it, to send something, waits until the next plan
is prepared: longer than a small step."""


def main() -> None:
    """Entry point of a worker: the first line of stdin is its WorkerStart. It works for the engine
    until its process is ended, or cannot go on."""
    watchdog = ParentWatchdog.of_this_process()
    start = WorkerStart.read(watchdog.read_line())
    watchdog.start()
    # leftovers of a killed compiler are removed with it
    os.environ["TMPDIR"] = str(watchdog.directory)
    # Both import torch.
    from nanoserve.executor.workers.building import work
    from nanoserve.executor.workers.measuring import measure

    sys.setswitchinterval(_SWITCH_SECONDS)
    endpoint = WorkerEndpoint(start)
    endpoint.introduce(Hello(start.rank))
    try:
        if start.measures:
            measure(start, endpoint)
        work(start, endpoint)
    except Exception as error:
        failed = WorkerFailed.of(start.rank, error)
    endpoint.report(failed)
    endpoint.close()
    os._exit(failed.exit_code)  # at once: torch would wait for the other workers


def start_worker(number: int, threads: int, directory: Path) -> TiedChild:
    """Start a process that waits for its WorkerStart; lists of processes show its number on this
    machine. Raises OSError if it cannot be started."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    return TiedChild(_PROGRAM, str(number), directory=directory, environment=environment)
