"""The workers of several engines together: starting all of them, and waiting for any of them."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import zmq

from nanoserve.engine_config import EngineConfig
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.runtime.workers.executor import WorkersExecutor
from nanoserve.runtime.workers.outstanding import RemoteLayers

_WATCH_SECONDS = 1.0
"""How long to wait at most, so that workers that are silent are noticed."""


def start_workers(
    resolved: ResolvedModel, config: EngineConfig, *, progress: ProgressCallback | None, **settings: Any
) -> list[WorkersExecutor]:
    """Start the workers of every engine, at the same time; progress is that of the first engine. Raises NanoserveError
    if some cannot start; none is left then.

    Args:
        settings: others of the WorkersExecutor.
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
        layers = RemoteLayers(executors)
        for executor in executors:
            executor.layers = layers
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
