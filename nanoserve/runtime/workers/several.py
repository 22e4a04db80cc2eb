"""The workers of several engines together: starting, compiling for all of them, and waiting for any of them."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from nanoserve.engine_config import EngineConfig
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.runtime.workers.executor import WorkersExecutor

_WATCH_SECONDS = 1.0
"""How long to wait at most, so that workers that are silent are noticed."""


def start_workers(
    resolved: ResolvedModel, config: EngineConfig, *, progress: ProgressCallback | None, **settings: Any
) -> list[WorkersExecutor]:
    """Start the workers of every engine, at the same time; progress is that of the first engine.

    Args:
        settings: others of the WorkersExecutor.

    Raises:
        NanoserveError: if some cannot start; none is left then.
    """
    with ExitStack() as failing:
        executors: list[WorkersExecutor] = []
        for engine in range(config.data_parallel):
            shown = progress if engine == 0 else None
            executor = WorkersExecutor(resolved, config, progress=shown, engine=engine, wait=False, **settings)
            failing.callback(executor.close)
            executors.append(executor)
        for executor in executors:
            executor.wait_until_ready()
        failing.pop_all()  # their engines close them
    return executors


def wait_for_news(executors: Sequence[WorkersExecutor], until: float | None) -> None:
    """Wait until workers say something, which may be nothing of note, at most until that monotonic time.

    Args:
        executors: that were all asked for their news before.
    """
    if any(executor.has_news for executor in executors):
        return
    seconds = _WATCH_SECONDS if until is None else min(_WATCH_SECONDS, max(0.0, until - time.monotonic()))
    poller = zmq.Poller()
    for executor in executors:
        for source in executor.sources:
            poller.register(source, zmq.POLLIN)
    poller.poll(math.ceil(1000 * seconds))


class LayersOfAll:
    """The compiled layers of all engines: one engine after the other, so that each finds what the first has made.

    Args:
        executors: of one model.
    """

    def __init__(self, executors: Sequence[WorkersExecutor]) -> None:
        self._executors = tuple(executors)
        self._wanted = self._waited = False
        self._begun = 0  # engines that have

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled."""
        return all(executor.layers.loaded for executor in self._executors)

    @property
    def pending(self) -> bool:
        """Whether some are being compiled, or are to be."""
        return self._wanted and (self._begun < len(self._executors) or any(map(_compiles, self._executors)))

    def start(self, *, waited: bool = False) -> None:
        """Begin to load them, or to compile what is missing; `waited` as for one library."""
        self._wanted, self._waited = True, waited
        self.go_on()

    def go_on(self) -> None:
        """Begin with the next engine once those before are through; to be called now and then."""
        while self._wanted and self._begun < len(self._executors) and not any(map(_compiles, self._executors)):
            executor = self._executors[self._begun]
            self._begun += 1
            if not executor.failed:
                executor.layers.start(waited=self._waited)

    def wait(self) -> None:
        """Wait for what has been started, as long as the workers live; between two runs, when no plan is in flight."""
        for executor in self._executors:
            self.go_on()
            if not executor.failed:
                executor.layers.wait()


def _compiles(executor: WorkersExecutor) -> bool:
    """Whether its workers compile, or will once they are started again."""
    return executor.layers.pending and not executor.failed
