"""Recorder: the only wrapper around an engine's scheduler and executor; it sees everything that passes between them.

There is one where predictors learn or someone observes the engine; without, the engine counts and nothing else is done.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Protocol, runtime_checkable

from nanoserve.errors import RuntimeFailure
from nanoserve.record.events import (
    Arrived,
    Blocks,
    Collected,
    Event,
    ExecutorFailed,
    Finished,
    Gained,
    Observer,
    Planned,
    Stopped,
    Worked,
    step_tokens,
)
from nanoserve.record.forecasts import Forecasts
from nanoserve.record.times import StageTimes, Times
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.cohorts import HostCohorts
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler

_TICKS_PER_SECOND = 2**20
"""Sums and differences of whole ticks are exact in floating point."""


@runtime_checkable
class Telling(Protocol):
    """An executor that tells what it did when."""

    def take_times(self) -> Sequence[Times]:
        """What it did since the last call."""


class Recorder:
    """Stands between an engine and its executor, observes its scheduler, and receives arrivals and aborts.

    Args:
        scheduler: learns from what happens through the recorder's `forecasts`.
        executor: of any kind; one that is `Telling` is asked for its times behind every plan and result.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.executor = executor
        self.executor_seconds = 0.0  # real time spent in the executor
        self.forecasts = Forecasts(scheduler.predictors, self._emit)
        self._scheduler = scheduler
        self._telling = executor if isinstance(executor, Telling) else None
        self._observers: list[Observer] = []
        self._load: Load | None = None
        self._decision = Decision(0, 0)
        self._clock: float | None = None
        scheduler.observer = self

    # ---- observers --------------------------------------------------------------------------------------------

    def add(self, *observers: Observer) -> None:
        """Show observers everything from now on."""
        self._observers += observers

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Show an observer what happens within."""
        self.add(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def step_clock(self) -> None:
        """Let the engine's clock stand still but while results are waited for, like a virtual one.

        What the engine does between two of them, it does at one moment. That is what makes a replay exact.
        """
        self._clock = 0.0
        self._tick()

    def finish(self) -> None:
        """Tell that the run is over; the executor stays open."""
        self._ask_times()
        self._emit(Finished(self.executor.now(), Blocks.of(self._scheduler)))

    # ---- the executor -----------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Pass a plan on.

        Raises: as the executor does.
        """
        handed_over = self.executor.now() if self._observers else 0.0
        began = time.perf_counter()
        try:
            self.executor.submit(plan)
        except RuntimeFailure:
            self._emit(ExecutorFailed(self.executor.now()))
            raise
        finally:
            self.executor_seconds += time.perf_counter() - began
        if self._observers:
            clock = handed_over if self._clock is None else self._clock
            forecast, blocks = self.forecasts.of(plan.step), Blocks.of(self._scheduler)
            thought = self._load, self._decision, blocks, forecast
            self._emit(Planned(handed_over, clock, plan, *thought, *step_tokens(plan)))
        self._ask_times()

    def collect(self, until: float | None) -> list[StepResult]:
        """Wait with the executor.

        Raises: as the executor does.
        """
        began = time.perf_counter()
        try:
            results = self.executor.collect(until)
        except RuntimeFailure:
            self._emit(ExecutorFailed(self.executor.now()))
            raise
        finally:
            self.executor_seconds += time.perf_counter() - began
        if self._clock is not None:
            self._tick()
        if results and self._observers:
            self._emit(Collected(self.executor.now(), self.now(), tuple(results), self.forecasts.corrections))
        self._ask_times()
        return results

    def now(self) -> float:
        """The engine's time: the executor's, or that at which it last was asked for results."""
        return self.executor.now() if self._clock is None else self._clock

    def close(self) -> None:
        """Close the executor, then tell that the run is over.

        Raises:
            RuntimeFailure: if an observer could not do its work to the end.
        """
        self._ask_times()
        ended = Finished(self.executor.now(), Blocks.of(self._scheduler))
        self.executor.close()
        self._emit(ended)

    # ---- the engine -------------------------------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        """The engine took a request in."""
        if self._observers:
            self._emit(Arrived(self.now(), request))

    def on_stop(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """A request or a sample is ended from outside."""
        if self._observers:
            self._emit(Stopped(self.now(), request_id, index, reason))

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        """What sequences gained."""
        if updates and self._observers:
            self._emit(Gained(self.now(), tuple(updates)))

    # ---- the scheduler ----------------------------------------------------------------------------------------

    def on_plan(self, plan: StepPlan, load: Load, decision: Decision, cohorts: HostCohorts) -> None:
        """A plan is made from what the policy saw and decided; the cohorts do not follow it yet."""
        self._load, self._decision = load, decision
        self.forecasts.on_plan(plan, decision, cohorts)

    def on_result(self, result: StepResult, cohorts: HostCohorts) -> None:
        """A result is taken in; the cohorts do not advance by it yet."""
        self.forecasts.on_result(result, cohorts)

    def on_reset(self) -> None:
        """No result will come of the plans in flight."""
        self.forecasts.on_reset()

    # -----------------------------------------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        for observer in self._observers:
            observer(event)

    def _ask_times(self) -> None:
        if self._telling is None:
            return
        times = self._telling.take_times()
        if times and self._observers:
            stages = tuple([one for one in times if isinstance(one, StageTimes)])
            beside = tuple([one for one in times if not isinstance(one, StageTimes)])
            self._emit(Worked(stages, beside))

    def _tick(self) -> None:
        # Upwards: a request whose time has come on the executor's clock has come on this one, too. And no two moments
        # are the same, or a replay could not know which of a result and an arrival was first.
        assert self._clock is not None, "the clock is stepped"
        ticks = ceil(self.executor.now() * _TICKS_PER_SECOND)
        self._clock = max(self._clock + 1 / _TICKS_PER_SECOND, ticks / _TICKS_PER_SECOND)
