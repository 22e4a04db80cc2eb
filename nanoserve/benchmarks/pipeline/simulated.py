"""A real run, and the simulator given what its stages took: do they agree? No torch."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median

import msgspec

from nanoserve.engine import Engine
from nanoserve.measures.metrics import MILLISECONDS
from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.plan import Answer, StepPlan, work_of
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.executor import SimulatedExecutor
from nanoserve.simulator.fleet import drive
from nanoserve.simulator.measured_stages import MeasuredStages, MeasuredStep
from nanoserve.simulator.replay import replay

_TOKEN = 0
"""Answered to every row: lengths are fixed, so that no token ends a request."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated metrics of a run's requests over the real ones."""

    makespan: float
    ttft: float
    tpot: float | None
    """Ratios of the whole time and of the means; None where no request has a second token."""
    simulated_seconds: float
    simulated_ttft_ms: float
    simulated_tpot_ms: float | None
    """Simulated values that the ratios come from."""
    plans: int
    """Plans of the real run."""
    replayed: int
    """Plans that a replay of the record made again: all of them."""
    others: int
    """Micro-batches of the simulation that were not those of the real run."""


def compare_with_simulator(
    record: RunRecord, make_scheduler: Callable[[], Scheduler], *, vocab_size: int, tensor_parallel: int = 1
) -> Comparison:
    """Replay the record, and simulate the requests in the times that the run's stages took.

    Args:
        record: of a pipeline whose workers said what they did, with plans sent ahead.
        make_scheduler: makes one as the run had.

    Raises:
        ValueError: if the replay makes other plans.
    """
    replayed = replay(record, make_scheduler, vocab_size=vocab_size)
    times = MeasuredStages(measured_steps(record, tensor_parallel))
    executor = SimulatedExecutor(times, answer=answers)
    simulated = rerun(Engine(make_scheduler(), executor, vocab_size=vocab_size), record)
    ttft, tpot = _means(simulated)
    real_ttft, real_tpot = _means(record)
    return Comparison(
        makespan=simulated.makespan / record.makespan,
        ttft=ttft / real_ttft,
        tpot=None if tpot is None or real_tpot is None else tpot / real_tpot,
        simulated_seconds=simulated.makespan,
        simulated_ttft_ms=ttft * MILLISECONDS,
        simulated_tpot_ms=None if tpot is None else tpot * MILLISECONDS,
        plans=len(record.plans),
        replayed=len(replayed),
        others=times.others,
    )


def rerun(engine: Engine, record: RunRecord) -> RunRecord:
    """The record of the same requests on another engine, on whose clock they come from 0 on."""
    again = RunRecord(engine.executor.max_in_flight)
    engine.recorder.add(again)
    drive(engine, record.rebased_requests)
    return again


def answers(plan: StepPlan) -> tuple[Answer, ...]:
    """A token that means nothing for every row that is sampled."""
    return tuple(Answer(row.sequence, (_TOKEN,)) for row in plan.rows if row.sample)


def _means(record: RunRecord) -> tuple[float, float | None]:
    """TTFT and TPOT."""
    tpots = [timing.tpot for timing in record.timings if timing.tpot is not None]
    return fmean(timing.ttft for timing in record.timings), fmean(tpots) if tpots else None


def measured_steps(record: RunRecord, tensor_parallel: int = 1) -> list[MeasuredStep]:
    """What each plan took on each stage and on each link, and the host's part in it.

    A stage's time is what the simulator calls so: from the moment at which the plan before was computed, its own inputs
    were prepared and its activations there, whichever came last, until it was computed. What the worker does between
    two plans is in it.
    """
    stages = record.stages(tensor_parallel)
    links = [_send_seconds(before, after) for before, after in pairwise(stages)]
    began, free, prepared, steps = _could_be_made(record, stages[-1]), [0.0] * len(stages), 0.0, []
    for number, plan in enumerate(record.plans):
        parts, sends = [stage[number] for stage in stages], [link[number] for link in links]
        arrived = [0.0, *(before.computed + send for before, send in zip(parts, sends, strict=False))]
        starts = [max(*moments, times.prepared) for *moments, times in zip(arrived, free, parts, strict=True)]
        host = max(0.0, parts[0].prepared - max(prepared, began[plan.step]))
        free, prepared = [times.computed for times in parts], parts[0].prepared
        stage_seconds = tuple(max(0.0, end - start) for start, end in zip(starts, free, strict=True))
        steps.append(MeasuredStep(work_of(plan.rows), stage_seconds, tuple(sends), host))
    return steps


def _send_seconds(before: Sequence[StageTimes], after: Sequence[StageTimes]) -> list[float]:
    """How long each plan's activations were on their way from one stage to the next.

    That is seen where the next stage waited for them from the beginning. Where it turned to them later, it is at least
    what was still to wait for, and most likely what it is in the median of those that were seen.
    """
    both = list(zip(before, after, strict=True))
    seen = [late.arrived - early.computed for early, late in both if late.began <= early.computed]
    likely = median(seen) if seen else 0.0
    return [
        max(0.0, min(late.arrived - early.computed, max(likely, late.arrived - late.began))) for early, late in both
    ]


def _could_be_made(record: RunRecord, last_stage: list[StageTimes]) -> dict[int, float]:
    """For each plan, when in the simulator's eyes it could be: as soon as the last stage had computed another one.

    The engine hears of that a little later, takes the result in and decides; there, all this is the host's part. A plan
    that waited for no result could be made when a request came.
    """
    ended = {times.step: times.computed for times in last_stage}
    ended_at: dict[float, float] = {}
    for step, known in record.known.items():
        ended_at[known] = max(ended_at.get(known, 0.0), ended[step])
    return {step: ended_at.get(planned.clock, planned.clock) for step, planned in record.planned.items()}
