"""Real runs and the simulator, given what steps and moves took: do they agree? No torch."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from nanoserve.engine.engine import Engine
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.fleet import drive
from nanoserve.lab.simulator.pipeline import MovingTimes
from nanoserve.lab.simulator.replay import MeasuredStages, MeasuredStep, replay
from nanoserve.layout import ParallelLayout
from nanoserve.record.forecasts import learn_from_results
from nanoserve.record.metrics import MILLISECONDS
from nanoserve.record.recorder import recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.plan import Answer, StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import work_of


def compare_with_simulator(
    record: RunRecord,
    make_scheduler: Callable[[], Scheduler],
    *,
    vocab_size: int,
    layouts: Sequence[ParallelLayout] = (ParallelLayout(),),
) -> dict[str, Any] | None:
    """Replay a record of workers that reported their times, and simulate its requests in the times
    of steps and moves. Returns simulated metrics over the real ones, the simulated values, and the
    numbers of plans; None if one of the ``layouts`` computed nothing. Raises ValueError if the
    replay makes other plans."""
    replayed = replay(record, make_scheduler, vocab_size=vocab_size)
    block_size = make_scheduler().pool.block_size
    times = [_measured(record, number, layout, block_size) for number, layout in enumerate(layouts)]
    known = [one for one in times if one is not None]
    if len(known) < len(layouts):
        return None
    simulated = rerun(record, known, make_scheduler, vocab_size=vocab_size)
    (ttft, tpot), (real_ttft, real_tpot) = _means(simulated), _means(record)
    tpot_ratio: float | None = None
    tpot_ms: float | None = None
    if tpot is not None:
        tpot_ms = tpot * MILLISECONDS
        if real_tpot is not None:
            tpot_ratio = tpot / real_tpot
    return {
        "makespan": simulated.makespan / record.makespan,
        "ttft": ttft / real_ttft,
        "tpot": tpot_ratio,
        "simulated_seconds": simulated.makespan,
        "simulated_ttft_ms": ttft * MILLISECONDS,
        "simulated_tpot_ms": tpot_ms,
        "simulated_transitions": sum(
            plan.layouts.transition is not None for plan in simulated.plans
        ),
        "plans": len(record.plans),
        "replayed": len(replayed),
        # micro-batches that were not those of the real run
        "others": sum(one.others for one in known),
    }


def rerun(
    record: RunRecord,
    layouts: Sequence[MovingTimes],
    make_scheduler: Callable[[], Scheduler],
    *,
    vocab_size: int,
) -> RunRecord:
    """Simulate a run's requests, which come from time 0 on, in these times; only their lengths
    matter."""
    scheduler = make_scheduler()
    learn_from_results(scheduler)
    pool = scheduler.pool
    executor = SimulatedExecutor(
        *layouts, block_size=pool.block_size, groups=pool.groups, answer=_answers
    )
    again = RunRecord(executor.max_in_flight)
    engine = Engine(scheduler, executor, vocab_size=vocab_size)
    recorder_of(engine).add(again)
    drive(engine, record.rebased_requests)
    return again


def _answers(plan: StepPlan) -> tuple[Answer, ...]:
    """A token for every row that is sampled; which one does not matter, because lengths are
    fixed."""
    return tuple(Answer(row.sequence, (0,)) for row in plan.rows if row.sample)


def _means(record: RunRecord) -> tuple[float, float | None]:
    """Mean TTFT and TPOT; no TPOT where every request has a single token."""
    ttft = fmean(timing.ttft for timing in record.timings)
    tpots = [timing.tpot for timing in record.timings if timing.tpot is not None]
    if not tpots:
        return ttft, None
    return ttft, fmean(tpots)


def _measured(
    record: RunRecord, number: int, layout: ParallelLayout, block_size: int
) -> MeasuredStages | None:
    """The times of a layout; None if it computed nothing."""
    plans = [plan for plan in record.plans if plan.rows and plan.layouts.current == number]
    if not plans:
        return None
    changes = [plan.step for plan in record.plans if plan.layouts.transition == number]
    reload = 0.0
    if changes:
        reload = fmean(record.known[step] - record.planned[step].time for step in changes)
    swaps = _swap_token_seconds(record, number, block_size)
    steps = _measured_steps(record, plans, layout.tensor_parallel)
    return MeasuredStages(steps, swap_token_seconds=swaps, reload_seconds=reload)


def _swap_token_seconds(record: RunRecord, layout: int, block_size: int) -> float:
    """Seconds per token, from plan to answer, of swaps that began in this layout; each direction is
    a queue. A swap that follows its row begins when the step does. If it is answered with the step,
    it may have ended sooner: its tokens are then added to those of the next swap of the same plan
    that took longer."""
    answered = {
        swap: moment
        for moment, done in record.collected.items()
        for result in done
        for swap in result.host.swapped
    }
    computing: dict[int, float] = {}  # when the first worker began to compute, by step
    for times in record.stage_times:
        computing[times.step] = min(times.started, computing.get(times.step, times.started))
    free: dict[str, float] = {}
    seconds, tokens = 0.0, 0
    for plan in record.plans:
        hidden = 0
        for swap in plan.host.swaps:
            begins = record.planned[plan.step].time
            if swap.after_row:
                begins = computing[plan.step]
            moved = hidden + len(swap.device_blocks) * block_size
            if swap.after_row and answered[swap.swap] <= record.known[plan.step]:
                hidden = moved
                continue
            began = max(begins, free.get(swap.direction, 0.0))
            free[swap.direction] = ended = answered[swap.swap]
            hidden = 0
            if plan.layouts.current == layout:
                seconds += max(0.0, ended - began)
                tokens += moved
    if not tokens:
        return 0.0
    return seconds / tokens


def _measured_steps(
    record: RunRecord, plans: Sequence[StepPlan], tensor_parallel: int
) -> list[MeasuredStep]:
    """Times of these plans of one layout, on each stage and on each link, and the host's part in
    them. A stage's time is the simulator's: it begins when the plan before was computed, its own
    inputs were prepared and its activations were there, whichever came last. It includes the
    worker's work between two plans."""
    of_plans = {plan.step for plan in plans}
    parts_of = (
        [times for times in stage if times.step in of_plans]
        for stage in record.stages(tensor_parallel)
    )
    stages = [stage for stage in parts_of if stage]
    links = [_send_seconds(before, after) for before, after in pairwise(stages)]
    began, prepared, steps = _could_be_made(record, stages[-1]), 0.0, []
    free = [0.0] * len(stages)  # when each stage had computed the plan before
    for number, plan in enumerate(plans):
        parts, sends = [stage[number] for stage in stages], [link[number] for link in links]
        arrived, stage_seconds = 0.0, []
        for place, times in enumerate(parts):
            start = max(arrived, free[place], times.prepared)
            stage_seconds.append(max(0.0, times.computed - start))
            free[place] = times.computed
            if place < len(sends):
                arrived = times.computed + sends[place]
        host = max(0.0, parts[0].prepared - max(prepared, began[plan.step]))
        prepared = parts[0].prepared
        steps.append(MeasuredStep(work_of(plan.rows), tuple(stage_seconds), tuple(sends), host))
    return steps


def _send_seconds(before: Sequence[StageTimes], after: Sequence[StageTimes]) -> list[float]:
    """How long each plan's activations were on their way from one stage to the next. That is seen
    where the next stage waited for them from the beginning. Elsewhere the way took at least the
    rest of the wait, and most likely the median of the ways that were seen."""
    both = list(zip(before, after, strict=True))
    seen = [late.arrived - early.computed for early, late in both if late.began <= early.computed]
    likely = 0.0
    if seen:
        likely = median(seen)
    return [
        max(0, min(late.arrived - early.computed, max(likely, late.arrived - late.began)))
        for early, late in both
    ]


def _could_be_made(record: RunRecord, last_stage: list[StageTimes]) -> dict[int, float]:
    """For each plan, when the simulator could make it: as soon as the last stage had computed
    another one. What the real engine does from then on counts as the host's part. A plan that
    waited for no result could be made when a request came."""
    ended_at: dict[float, float] = {}
    for times in last_stage:
        known = record.known[times.step]
        ended_at[known] = max(ended_at.get(known, 0.0), times.computed)
    return {
        step: ended_at.get(planned.clock, planned.clock) for step, planned in record.planned.items()
    }
