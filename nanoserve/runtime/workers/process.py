"""A worker process, from its first line of input on. The tie to its parent is there before torch is imported."""

import os
import sys
from pathlib import Path

import msgspec

from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.processes.watchdog import ParentWatchdog, own_pipes, read_line
from nanoserve.runtime.workers.endpoint import WorkerEndpoint
from nanoserve.runtime.workers.messages import Failed, Hello, WorkerStart

_SWITCH_SECONDS = 0.0002
"""How long one of a worker's two threads may keep the interpreter when the other wants it. With Python's 5 ms, a loop
that has only just let go of it, to send something, waits until the next plan is prepared: longer than a small step."""


def main() -> None:
    """Entry point of a worker that the engine starts: stdin brings the WorkerStart and is the lifeline."""
    parent, pulse = own_pipes()
    directory = Path(sys.argv[2])
    start = msgspec.json.decode(read_line(parent, directory), type=WorkerStart)
    ParentWatchdog(parent, pulse, directory).start()
    os.environ["TMPDIR"] = str(directory)  # what a compiler leaves that is killed goes with the rest
    run_worker(start)


def run_worker(start: WorkerStart) -> None:
    """Work for the engine until this process is ended, or cannot go on."""
    from nanoserve.runtime.workers.building import build_worker

    sys.setswitchinterval(_SWITCH_SECONDS)
    endpoint = WorkerEndpoint(start)
    endpoint.introduce(Hello(start.rank))
    try:
        build_worker(start, endpoint).run()
    except NanoserveError as error:
        failed = Failed(start.rank, str(error), error.exit_code)
    except Exception as error:
        # Workers that wait for another's hidden states fail with it: the engine knows who was the first.
        reason = (str(error).strip().splitlines() or [""])[0]
        failed = Failed(start.rank, f"{type(error).__name__}: {reason}", RuntimeFailure.exit_code)
    endpoint.report(failed)
    endpoint.close()
    os._exit(failed.exit_code)  # at once: torch would wait for the other workers
