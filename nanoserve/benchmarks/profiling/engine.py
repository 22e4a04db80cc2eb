"""Timing an engine's own work in a step: scheduling, and taking answers in. No torch."""

import statistics
import time
from itertools import count

from nanoserve.engine import Engine
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult

_PROMPT, _ANSWER = 4, 10


class _InnerTime:
    """Passes everything on to an executor and adds up the time that passes in it."""

    def __init__(self, executor: Executor) -> None:
        self.seconds = 0.0
        self.max_in_flight = executor.max_in_flight
        self.feeds_tokens = executor.feeds_tokens
        self.wrapped = executor

    def submit(self, plan: StepPlan) -> None:
        began = time.perf_counter()
        self.wrapped.submit(plan)
        self.seconds += time.perf_counter() - began

    def collect(self, until: float | None) -> list[StepResult]:
        began = time.perf_counter()
        results = self.wrapped.collect(until)
        self.seconds += time.perf_counter() - began
        return results

    def now(self) -> float:
        return self.wrapped.now()

    def close(self) -> None:
        self.wrapped.close()


class EngineTimer:
    """Runs requests on an engine that has nothing else to do."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._names = engine, count()
        pool = engine.scheduler.pool
        # decodes at a time for which there are KV blocks.
        self.most_rows = pool.num_blocks // -(-(_PROMPT + _ANSWER) // pool.block_size)

    def seconds(self, rows: int) -> float:
        """What the engine adds to a step of so many decodes: the median over the steps of a short run."""
        engine, inner = self._engine, _InnerTime(self._engine.executor)
        for _ in range(rows):
            name = f"profile-{next(self._names)}"
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_ANSWER)
            engine.add(Request(name, (1,) * _PROMPT, params, seed=0, arrival_time=engine.now(), cache_salt=name))
        engine.executor, outside = inner, []
        try:
            while engine.has_work:
                began, before = time.perf_counter(), inner.seconds
                updates = engine.step()
                if len(updates) == rows:
                    outside.append(time.perf_counter() - began - (inner.seconds - before))
        finally:
            engine.executor = inner.wrapped
        return statistics.median(outside)
