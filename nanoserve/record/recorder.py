"""Recorder: the only wrapper around an engine's scheduler and executor; it sees everything that passes between them.

Without observers, as in serving, it keeps counts and a ring of recent steps. Observers are shown every event and decide
what to keep: sketches, a trace, a window, or everything (`RunRecord`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from math import ceil
from typing import Protocol, TypeVar, runtime_checkable

from nanoserve.errors import RuntimeFailure
from nanoserve.record import events
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.record.times import StageTimes, Times
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.cohorts import HostCohorts
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.speculator import GuessCounts

T = TypeVar("T")
R = TypeVar("R")

RECENT_STEPS = 32  # steps that a recorder keeps, to show what an engine did last
_TICKS_PER_SECOND = 2**20  # sums and differences of whole ticks are exact in floating point


@runtime_checkable
class Telling(Protocol):
    """An executor that reports its times."""

    def take_times(self) -> SequenceOf[Times]:
        """Return the times since the last call."""


class Recorder:
    """Stands between an engine and its executor, observes its scheduler, and receives arrivals and aborts."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.executor = executor
        self.executor_seconds = 0.0  # real time spent in the executor
        self.losses = 0  # how often the executor's workers died and new ones were started
        self._scheduler = scheduler
        self._recent: deque[RecentStep] = deque(maxlen=RECENT_STEPS)
        self._take_times = executor.take_times if isinstance(executor, Telling) else tuple
        self._observers: list[events.Observer] = []
        self._clock: float | None = None
        self._load: Load | None = None
        self._decision = Decision(0, 0)  # what the policy saw and decided for the newest plan
        scheduler.observers.append(self)

    @property
    def status(self) -> EngineStatus:
        scheduler, speculator = self._scheduler, self._scheduler.table.speculator
        return EngineStatus(
            layouts=(scheduler.layouts.current,),
            changing=(scheduler.layouts.changing,),
            running=len(scheduler.running),
            on_host=len(scheduler.on_host),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.free_blocks,
            total_blocks=scheduler.pool.num_blocks,
            free_host_blocks=scheduler.host_pool.free_blocks,
            total_host_blocks=scheduler.host_pool.num_blocks,
            prompt_tokens=scheduler.prompt_tokens,
            output_tokens=scheduler.output_tokens,
            preemptions=scheduler.table.preemptions,
            steps=scheduler.steps,
            transitions=scheduler.transitions,
            losses=self.losses,
            host_losses=scheduler.host_losses,
            guesses=GuessCounts() if speculator is None else speculator.counts + GuessCounts(),
        )

    def take_steps(self) -> list[RecentStep]:
        """The steps that have ended since the last call, at most RECENT_STEPS."""
        steps = list(self._recent)
        self._recent.clear()
        return steps

    def add(self, *observers: events.Observer) -> None:
        self._observers += observers

    @contextmanager
    def observed_by(self, observer: events.Observer) -> Iterator[None]:
        self.add(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def step_clock(self) -> None:
        """Let the engine's clock advance only while the engine waits for results: that makes a replay exact."""
        self._clock = self._after(0.0)

    def finish(self) -> None:
        """Emit the end of the run; the executor stays open."""
        self._show_times()
        self.emit(events.Finished(self.executor.now(), events.Blocks.of(self._scheduler)))

    def submit(self, plan: StepPlan) -> None:
        """Pass a plan on; raises as the executor does."""
        handed_over = self.executor.now() if self._observers else 0.0
        self._call(self.executor.submit, plan)
        if self._observers:
            clock = handed_over if self._clock is None else self._clock
            blocks, tables = events.Blocks.of(self._scheduler), tuple(self._tables())
            self.emit(events.Planned(handed_over, clock, plan, self._load, self._decision, blocks, tables))
        self._show_times()

    def collect(self, until: float | None) -> list[StepResult]:
        """Wait with the executor; raises as it does."""
        results, scheduler = self._call(self.executor.collect, until), self._scheduler
        if self._clock is not None:
            self._clock = self._after(self._clock)
        for result in results:
            self.losses += result.lost is not None
            if (plan := scheduler.plans_in_flight.get(result.step)) is not None:  # its result is not applied yet
                held = len(scheduler.running), len(scheduler.waiting)
                self._recent.append(RecentStep(plan.step, plan.decodes, plan.prompt_tokens, *held, result.seconds))
        if results and self._observers:
            self.emit(events.Collected(self.executor.now(), self.now(), tuple(results)))
        self._show_times()
        return results

    def now(self) -> float:
        """The executor's time, or that of the last results if the clock is stepped."""
        return self.executor.now() if self._clock is None else self._clock

    def close(self) -> None:
        """Emit the end of the run and close the executor; raises RuntimeFailure if an observer could not finish."""
        try:
            self.finish()
        finally:
            self.executor.close()

    def on_request(self, request: Request) -> None:
        self.emit(events.Arrived(self.now(), request))

    def on_stop(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        self.emit(events.Stopped(self.now(), request_id, index, reason))

    def on_updates(self, updates: list[SequenceUpdate]) -> None:
        if updates and self._observers:
            self.emit(events.Gained(self.now(), tuple(updates)))

    def on_plan(self, plan: StepPlan, load: Load, decision: Decision, cohorts: HostCohorts) -> None:
        """Remember what the scheduler made the newest plan from."""
        self._load, self._decision = load, decision

    def on_result(self, result: StepResult, cohorts: HostCohorts) -> None:
        """Results are seen when the executor gives them, before the scheduler."""

    def on_reset(self) -> None:
        """Plans in flight are not kept here."""

    def emit(self, event: events.Event) -> None:
        """Show an event to all observers."""
        for observer in self._observers:
            observer(event)

    def _call(self, part: Callable[[T], R], argument: T) -> R:
        """Call a part of the executor, and count its time."""
        began = time.perf_counter()
        try:
            return part(argument)
        except RuntimeFailure:
            self.emit(events.ExecutorFailed(self.executor.now()))
            raise
        finally:
            self.executor_seconds += time.perf_counter() - began

    def _show_times(self) -> None:
        if (times := self._take_times()) and self._observers:
            stages = tuple([one for one in times if isinstance(one, StageTimes)])
            beside = tuple([one for one in times if not isinstance(one, StageTimes)])
            self.emit(events.Worked(stages, beside))

    def _tables(self) -> Iterator[events.HeldBlocks]:
        is_wanted = any(getattr(one, "keeps_tables", False) for one in self._observers)
        for one in self._scheduler.table.sequences.values() if is_wanted else ():
            if one.block_table:
                yield events.HeldBlocks(one.sequence_id, "device", tuple(one.block_table), one.computed)
            if one.host_table:
                yield events.HeldBlocks(one.sequence_id, "host", tuple(one.host_table), one.computed)

    def _after(self, clock: float) -> float:
        # Rounded up: a request that is due on the executor's clock is due on this one. No two moments are equal, or a
        # replay could not know whether a result or an arrival came first.
        ticks = ceil(self.executor.now() * _TICKS_PER_SECOND)
        return max(clock + 1 / _TICKS_PER_SECOND, ticks / _TICKS_PER_SECOND)
