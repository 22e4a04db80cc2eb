"""Requests through an engine whose CPU attends beside the device: what came out, where and when. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from nanoserve.benchmarks.pipeline.running import Outcome, PipelineRun, TokenTimes
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.record.forecasts import Forecast, forecasts_of
from nanoserve.request import Request, SequenceUpdate
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult, Tier
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.record import record_run


@dataclass(frozen=True, slots=True)
class HybridRun(PipelineRun):
    """One run, real or simulated, in one process."""

    tiers: tuple[tuple[Tier, ...], ...]
    """For each request, in which memory the KV was when each of its tokens was computed."""
    forecasts: tuple[Forecast, ...]
    """Of the steps that were predicted."""

    @property
    def results(self) -> Iterator[StepResult]:
        """All, in the order in which they became known."""
        return chain.from_iterable(self.record.collected.values())


class _Sequences(TokenTimes):
    """Also which sequence each request became."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self.of_request: dict[str, int] = {}

    def on_updates(self, now: float, updates: Sequence[SequenceUpdate]) -> None:
        """What sequences gained at this moment."""
        super().on_updates(now, updates)
        self.of_request |= {update.request_id: update.sequence.sequence_id for update in updates}


def run_requests(
    executor: Executor, make_scheduler: Callable[[], Scheduler], requests: Sequence[Request], *, vocab_size: int
) -> HybridRun:
    """Run requests to their ends under a new scheduler.

    Args:
        executor: with nothing in flight; it is not closed.
        requests: with arrival times from the beginning of the run on, in order.

    Raises:
        UsageError: if a request can never run.
        RuntimeFailure: if one fails, or attention on the CPU is lost.
    """
    scheduler = make_scheduler()
    forecasts: list[Forecast] = []
    forecasts_of(scheduler).watch(forecasts.append)
    began = executor.now()
    moved = [replace(request, arrival_time=began + request.arrival_time) for request in requests]
    tokens = _Sequences(moved)
    record = record_run(Engine(scheduler, executor, vocab_size=vocab_size), moved, tokens.on_updates)
    tiers = tiers_of_tokens(record.plans)
    run = HybridRun(
        outcome=Outcome.of(moved, tokens),
        record=record,
        stage_times=(),
        preemptions=scheduler.preemptions,
        tiers=tuple(tiers[tokens.of_request[request.request_id]] for request in moved),
        forecasts=tuple(forecasts),
    )
    if losses := [result.host_lost for result in run.results if result.host_lost is not None]:
        raise RuntimeFailure(f"nothing can be measured of a run in which attention on the CPU is lost: {losses[0]}")
    return run


def tiers_of_tokens(plans: Sequence[StepPlan]) -> dict[int, tuple[Tier, ...]]:
    """For each sequence, where the KV was for each of its tokens: every row that is sampled begins one."""
    found: dict[int, list[Tier]] = {}
    for plan in plans:
        for row in plan.rows:
            if row.sample and row.tokens:  # a row of no tokens finishes what an earlier one began
                found.setdefault(row.sequence, []).append(row.tier)
    return {sequence: tuple(tiers) for sequence, tiers in found.items()}
