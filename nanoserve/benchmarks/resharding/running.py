"""Requests through workers that change their parallel layout: what came out, and what was moved when. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from nanoserve.benchmarks.pipeline.running import Outcome, PipelineRun, TokenTimes, all_times
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.layout import ParallelLayout
from nanoserve.request import Request
from nanoserve.runtime.trace.phases import EngineState, Phase, PhaseTracker
from nanoserve.runtime.trace.stage_times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.record import record_run


class LayoutsExecutor(Executor, Protocol):
    """What workers with one parallel layout or several are to a benchmark."""

    layout: int
    """Number of the one that runs."""

    def take_times(self) -> list[StageTimes]:
        """What the workers reported of their steps since the last call."""

    def take_moves(self) -> list[ReshardTimes | SwapTimes]:
        """What they moved between device and host memory since the last call."""


@dataclass(frozen=True, slots=True)
class Place:
    """Workers, and how a variant uses them."""

    executor: LayoutsExecutor
    layouts: tuple[ParallelLayout, ...]
    """By the numbers of its schedulers: one, or that of prompts and that of decodes."""
    first: int
    """The workers' number of the first of these."""
    workers: int
    """How many there are."""
    block_size: int
    """Tokens of a KV block."""
    host_link_bandwidth: float | None
    """As it was measured, in bytes per second of one worker; None where it was not."""


@dataclass(frozen=True, slots=True)
class ReshardRun(PipelineRun):
    """One run for real."""

    moves: tuple[ReshardTimes | SwapTimes, ...]
    """Of every worker."""
    phases: tuple[Phase, ...]
    """One after the other, on the executor's clock."""
    states: tuple[tuple[float, EngineState], ...]
    """What the scheduler showed when, at every plan."""


class WatchedExecutor:
    """Passes everything on to an executor, and notes phases and what the scheduler shows at every plan.

    Args:
        layout: the workers' number of the scheduler's first layout, where that is its only one.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler, *, layout: int) -> None:
        self.max_in_flight = executor.max_in_flight
        self.feeds_tokens = executor.feeds_tokens
        self.phases: list[Phase] = []
        self.states: list[tuple[float, EngineState]] = []
        self._executor = executor
        self._scheduler = scheduler
        self._layout = layout
        self._tracker = PhaseTracker()

    def submit(self, plan: StepPlan) -> None:
        """Pass a plan on and note what the scheduler shows."""
        now, state = self.now(), EngineState.of(self._scheduler)
        self.phases += self._tracker.on_submit(plan, now, state)
        self.states.append((now, state))
        self._executor.submit(msgspec.structs.replace(plan, layout=self._layout) if self._layout else plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Wait with the executor and note what it says."""
        results = self._executor.collect(until)
        now = self.now()
        for result in results:
            self.phases += self._tracker.on_result(result, now)
        return results

    def now(self) -> float:
        """The executor's."""
        return self._executor.now()

    def finish(self) -> None:
        """The run is over."""
        self.phases += self._tracker.finish(self.now())
        self.states.append((self.now(), EngineState.of(self._scheduler)))

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()


def enter_layout(executor: LayoutsExecutor, layout: int) -> None:
    """Have the workers in that layout, whatever the run before has left them in; nothing is in flight.

    Raises:
        RuntimeFailure: if they die.
    """
    if executor.layout == layout:
        return
    executor.submit(StepPlan(0, layout=executor.layout, transition=layout))
    results: list[StepResult] = []
    while not results:
        results = executor.collect(None)
    if results[0].lost is not None:
        raise RuntimeFailure(f"the workers died when they changed their layout: {results[0].lost}")


def run_requests(
    place: Place, make_scheduler: Callable[[], Scheduler], requests: Sequence[Request], *, vocab_size: int
) -> ReshardRun:
    """Run requests to their ends under a new scheduler, and collect what the workers say of it.

    Args:
        place: with nothing in flight; its executor is not closed.
        requests: with arrival times from the beginning of the run on, in order.

    Raises:
        UsageError: if a request can never run.
        RuntimeFailure: if one fails, or a worker dies or does not say what it did.
    """
    executor = place.executor
    enter_layout(executor, place.first)
    executor.take_times(), executor.take_moves()  # of what was before
    scheduler = make_scheduler()
    watched = WatchedExecutor(executor, scheduler, layout=place.first)
    began = executor.now()
    moved = [replace(request, arrival_time=began + request.arrival_time) for request in requests]
    tokens = TokenTimes(moved)
    record = record_run(Engine(scheduler, watched, vocab_size=vocab_size), moved, tokens.on_updates)
    watched.finish()
    losses = [result.lost for results in record.collected.values() for result in results if result.lost is not None]
    if losses:
        raise RuntimeFailure(f"nothing can be measured of a run in which workers die: {losses[0]}")
    steps = sum(bool(plan.rows) for plan in record.plans)
    return ReshardRun(
        outcome=Outcome.of(moved, tokens),
        record=record,
        stage_times=all_times(executor, steps * place.workers),
        preemptions=scheduler.preemptions,
        moves=tuple(executor.take_moves()),
        phases=tuple(watched.phases),
        states=tuple(watched.states),
    )
