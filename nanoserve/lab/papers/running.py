"""Many independent simulations on all cores: deterministic, each job once, and Ctrl-C ends it all
at once."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.machine import available_cores
from nanoserve.lab.papers.framework import Outcomes, SimulationJob

Progress = Callable[[int, int], None]  # takes how many jobs are done, and of how many


class Runner:
    """Runs jobs and keeps their outcomes; a context manager, because it holds processes.

    A process is "spawned", so that it inherits nothing: outcomes are the same wherever a job runs,
    in whatever order. There is one for each core, unless ``workers`` says otherwise; with one
    worker, jobs run in this process.
    """

    def __init__(
        self, workers: int | None = None, progress: Progress = lambda done, total: None
    ) -> None:
        self._workers = workers or available_cores()
        self._progress = progress
        self._pool: ProcessPoolExecutor | None = None
        self._outcomes: dict[SimulationJob, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        if kind is not None:  # what runs is of no use any more
            for process in list((self._pool._processes or {}).values()):
                process.terminate()
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, jobs: Iterable[SimulationJob]) -> Outcomes:
        """The outcomes of these jobs, and of all before; what is known already does not run again.

        Raises RuntimeFailure if a process died, for want of memory perhaps.
        """
        missing = [job for job in dict.fromkeys(jobs) if job not in self._outcomes]
        if self._workers == 1 or len(missing) == 1:
            for done, job in enumerate(missing, start=1):
                self._outcomes[job] = job.run()
                self._progress(done, len(missing))
            return self._outcomes
        futures = {self._submit(job): job for job in missing}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                self._outcomes[futures[future]] = future.result()
                self._progress(done, len(missing))
        except BrokenProcessPool as error:
            raise RuntimeFailure("a process that simulated has died: too little memory?") from error
        return self._outcomes

    def _submit(self, job: SimulationJob) -> "Future[Any]":
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, _begin_process)
        return self._pool.submit(job.run)


def _begin_process() -> None:
    """Ctrl-C reaches every process of a terminal, and only the first one answers it; no process
    outlives that one. Each has a core to itself, and one thread for a torch that it may import."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
