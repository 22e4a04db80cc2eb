"""Timing an engine's own work in a step: scheduling, and taking answers in. No torch."""

import statistics
import time
from itertools import count

from nanoserve.engine import Engine
from nanoserve.request import Request, SamplingParams

_PROMPT, _ANSWER = 4, 10


class EngineTimer:
    """Runs requests on an engine that has nothing else to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._names = engine, count()
        pool = engine.scheduler.pool
        # decodes at a time for which there are KV blocks.
        self.most_rows = pool.num_blocks // -(-(_PROMPT + _ANSWER) // pool.block_size)

    def seconds(self, rows: int) -> float:
        """What the engine adds to a step of so many decodes: the median over the steps of a short run."""
        engine, recorder = self._engine, self._engine.recorder
        for _ in range(rows):
            name = f"profile-{next(self._names)}"
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_ANSWER)
            engine.add(Request(name, (1,) * _PROMPT, params, seed=0, arrival_time=engine.now(), cache_salt=name))
        outside = []
        while engine.has_work:
            began, before = time.perf_counter(), recorder.executor_seconds
            updates = engine.step()
            if len(updates) == rows:
                outside.append(time.perf_counter() - began - (recorder.executor_seconds - before))
        return statistics.median(outside)
