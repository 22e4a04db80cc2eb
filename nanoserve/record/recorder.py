"""Recorder: listens to an engine and its scheduler, and makes events of everything that passes
between them.

An engine has no recorder until a caller asks for events. Observers of the events decide what to
keep: sketches, a trace, a window, or everything (`RunRecord`).
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from nanoserve.record import events
from nanoserve.record.engine_observer import EngineObserver
from nanoserve.record.forecasts import Forecasts
from nanoserve.record.times import StageTimes, Times
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler


@runtime_checkable
class TimedExecutor(Protocol):
    """An executor that reports its times."""

    def take_times(self) -> SequenceOf[Times]:
        """Return the times since the last call."""


class RecordedEngine(Protocol):
    """The part of an engine that a recorder listens to."""

    scheduler: Scheduler
    executor: Executor
    observers: list[EngineObserver]
    now: Callable[[], float]


def recorder_of(engine: RecordedEngine) -> "Recorder":
    """Return the recorder that is attached to an engine, or attach one."""
    for observer in engine.observers:
        if isinstance(observer, Recorder):
            return observer
    return Recorder(engine)


@contextmanager
def recorded(engine: RecordedEngine, observer: events.Observer) -> Iterator[None]:
    """Show an engine's events to an observer inside the block."""
    recorder = recorder_of(engine)
    recorder.add(observer)
    try:
        yield
    finally:
        recorder.remove(observer)


class Recorder(EngineObserver):
    """Shows an engine's events to observers. `recorder_of` makes at most one for each engine."""

    def __init__(self, engine: RecordedEngine) -> None:
        self._engine, self._scheduler, self._executor = engine, engine.scheduler, engine.executor
        self._observers: list[events.Observer] = []
        self._forecasts = [one for one in engine.scheduler.observers if isinstance(one, Forecasts)]
        executor = engine.executor
        self._take_times = (
            executor.take_times if isinstance(executor, TimedExecutor) else tuple[Times, ...]
        )
        self._load: Load | None = None
        self._decision = Decision(0, 0)  # what the policy saw and decided for the newest plan
        # when that was planned, on the engine's clock and on the executor's
        self._clock = self._planned = 0.0
        engine.observers.append(self)
        engine.scheduler.observers.append(self)
        for forecasts in self._forecasts:
            forecasts.emit = self._emit
        self._take_times()  # nobody wants those of earlier steps

    def add(self, *observers: events.Observer) -> None:
        self._observers += observers
        self._choose_forecasts()

    def remove(self, observer: events.Observer) -> None:
        """Show an observer nothing more. Without observers the recorder leaves the engine."""
        self._observers.remove(observer)
        self._choose_forecasts()
        if not self._observers:
            self._engine.observers.remove(self)
            self._scheduler.observers.remove(self)

    def finish(self) -> None:
        """Emit the end of the run; the executor stays open."""
        self._show_times()
        self._emit(events.Finished(self._executor.now(), events.Blocks.of(self._scheduler)))

    # ---- the engine's part -----------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        self._emit(events.Arrived(self._engine.now(), request))

    def on_stop(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        self._emit(events.Stopped(self._engine.now(), request_id, index, reason))

    def on_submit(self, plan: StepPlan) -> None:
        blocks, tables = events.Blocks.of(self._scheduler), tuple(self._tables())
        self._emit(
            events.Planned(
                self._planned, self._clock, plan, self._load, self._decision, blocks, tables
            )
        )
        self._show_times()

    def on_results(self, results: SequenceOf[StepResult]) -> None:
        if results:
            self._emit(events.Collected(self._executor.now(), self._engine.now(), tuple(results)))
        self._show_times()

    def on_failure(self) -> None:
        self._emit(events.ExecutorFailed(self._executor.now()))

    def on_updates(self, updates: SequenceOf[SequenceUpdate]) -> None:
        if updates:
            self._emit(events.Gained(self._engine.now(), tuple(updates)))

    def on_close(self) -> None:
        """Emit the end of the run; raises RuntimeFailure if an observer could not finish."""
        self.finish()

    # ---- the scheduler's part --------------------------------------------------------------------

    def on_plan(self, plan: StepPlan, load: Load, decision: Decision) -> None:
        """Remember what the scheduler made the newest plan from."""
        self._load, self._decision = load, decision
        self._clock = self._engine.now()
        self._planned = self._executor.now()

    def on_result(self, result: StepResult) -> None:
        """Results are seen when the executor gives them, before the scheduler."""

    def on_reset(self) -> None:
        """Plans in flight are not kept here."""

    # ----------------------------------------------------------------------------------------------

    def _emit(self, event: events.Event) -> None:
        for observer in self._observers:
            observer(event)

    def _choose_forecasts(self) -> None:
        """Have every plan predicted if an observer wants it."""
        for forecasts in self._forecasts:
            forecasts.of_all = any(
                getattr(one, "wants_forecasts", False) for one in self._observers
            )

    def _show_times(self) -> None:
        times = self._take_times()
        if times:
            stages = tuple([one for one in times if isinstance(one, StageTimes)])
            beside = tuple([one for one in times if not isinstance(one, StageTimes)])
            self._emit(events.Worked(stages, beside))

    def _tables(self) -> Iterator[events.HeldBlocks]:
        is_wanted = any(getattr(one, "keeps_tables", False) for one in self._observers)
        for one in self._scheduler.table.sequences.values() if is_wanted else ():
            if one.block_table:
                yield events.HeldBlocks(
                    one.sequence_id, "device", tuple(one.block_table), one.computed
                )
            if one.host_table:
                yield events.HeldBlocks(
                    one.sequence_id, "host", tuple(one.host_table), one.computed
                )
