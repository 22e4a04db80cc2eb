"""Requests through workers that change their parallel layout: what came out, and what was moved when. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from nanoserve.benchmarks.pipeline.running import run_requests
from nanoserve.errors import RuntimeFailure
from nanoserve.layout import ParallelLayout
from nanoserve.record.recorder import Telling
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler


class LayoutsExecutor(Executor, Telling, Protocol):
    """What workers with one parallel layout or several are to a benchmark."""

    layout: int
    """Number of the one that runs."""


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


class _InLayout:
    """Workers that stay in another layout than their first one, which is the only one that the scheduler knows."""

    def __init__(self, executor: LayoutsExecutor, layout: int) -> None:
        self.max_in_flight = executor.max_in_flight
        self.feeds_tokens = executor.feeds_tokens
        self.ready = executor.ready
        self.collect, self.now, self.close = executor.collect, executor.now, executor.close
        self.take_times = executor.take_times
        self._executor = executor
        self._layout = layout

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(msgspec.structs.replace(plan, layout=self._layout))


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


def run_in_layouts(
    place: Place, make_scheduler: Callable[[], Scheduler], requests: Sequence[Request], *, vocab_size: int
) -> RunRecord:
    """Run requests to their ends, beginning in the place's first layout.

    Args, raises: as `run_requests` has them; the place's executor is not closed.
    """
    enter_layout(place.executor, place.first)
    executor = _InLayout(place.executor, place.first) if place.first else place.executor
    return run_requests(executor, make_scheduler, requests, vocab_size=vocab_size, workers=place.workers)
