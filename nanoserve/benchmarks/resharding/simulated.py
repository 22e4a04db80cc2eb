"""A real run with two layouts, and the simulator given what its steps and moves took: do they agree? No torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import msgspec

from nanoserve.benchmarks.pipeline.running import Outcome, PipelineRun, TokenTimes
from nanoserve.benchmarks.pipeline.simulated import answers, measured_steps
from nanoserve.benchmarks.resharding.running import Place, ReshardRun
from nanoserve.engine import Engine
from nanoserve.scheduler.plan import StepPlan, Swap
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.driving import drive
from nanoserve.simulator.measured_stages import MeasuredStages, MeasuredStep
from nanoserve.simulator.pipeline import Passage
from nanoserve.simulator.record import Record, replay
from nanoserve.simulator.tiered_executor import TieredExecutor


class ReshardComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The same requests, simulated over real."""

    makespan: float
    """Ratio of the whole times."""
    simulated_seconds: float
    simulated_transitions: int
    """Of the simulation."""
    plans: int
    """Of the real run."""
    replayed: int
    """How many of these a replay of the record made again: all."""
    others: int
    """Micro-batches of the simulation that were not those of the real run."""


class _Transitions:
    """A TierObserver that counts them."""

    def __init__(self) -> None:
        self.count = 0

    def on_swap(self, now: float, swap: Swap, tokens: int, passage: Passage) -> None:
        """Not counted."""

    def on_transition(self, now: float, plan: StepPlan, passage: Passage) -> None:
        """The layout changes."""
        self.count += 1

    def on_host_attention(self, passage: Passage, seconds: float, rows: int) -> None:
        """There is none."""


class MeasuredMoves(MeasuredStages):
    """MovingTimes of one layout: moves take what they took in the real run, in the mean.

    Args:
        steps: of the plans that ran in this layout.
        token_seconds: of a swap begun in this layout, for each token that its blocks hold.
        transition_seconds: of a change to this layout.
    """

    def __init__(self, steps: Sequence[MeasuredStep], token_seconds: float, transition_seconds: float) -> None:
        super().__init__(steps)
        self._token_seconds = token_seconds
        self._transition_seconds = transition_seconds

    def swap_seconds(self, tokens: int, stage: int) -> float:
        """All stages' at once: a swap is answered when the last worker has done its part."""
        return self._token_seconds * tokens

    def reload_seconds(self, stage: int) -> float:
        """All stages' at once, with telling the workers and hearing from them."""
        return self._transition_seconds


def compare_with_simulator(
    run: ReshardRun, place: Place, make_scheduler: Callable[[], Scheduler], *, vocab_size: int
) -> ReshardComparison | None:
    """Replay the record, and simulate the requests in the times that steps and moves of the run took.

    Returns:
        None where a layout computed nothing: nobody knows what that would take.

    Args:
        run: at that place.
        make_scheduler: makes one as the run had.

    Raises:
        ValueError: if the replay makes other plans.
    """
    replayed = replay(run.record, make_scheduler, vocab_size=vocab_size)
    layouts = measured_layouts(run, place)
    if len(layouts) < len(place.layouts):
        return None
    requests = [
        replace(request, arrival_time=arrival)
        for request, arrival in zip(run.record.arrivals, run.outcome.arrivals, strict=True)
    ]
    tokens, transitions = TokenTimes(requests), _Transitions()
    executor = TieredExecutor(layouts, block_size=place.block_size, answer=answers, tier_observers=[transitions])
    drive(Engine(make_scheduler(), executor, vocab_size=vocab_size), requests, tokens.on_updates)
    simulated = Outcome.of(requests, tokens)
    return ReshardComparison(
        makespan=simulated.makespan / run.outcome.makespan,
        simulated_seconds=simulated.makespan,
        simulated_transitions=transitions.count,
        plans=len(run.record.plans),
        replayed=len(replayed),
        others=sum(layout.others for layout in layouts),
    )


def measured_layouts(run: ReshardRun, place: Place) -> list[MeasuredMoves]:
    """The times of each layout that computed anything."""
    found = []
    for number, layout in enumerate(place.layouts):
        if not any(plan.rows for plan in run.record.plans if plan.layout == number):
            continue
        steps = measured_steps(_in_layout(run, number), layout.tensor_parallel)
        seconds = _swap_token_seconds(run, number, place.block_size)
        found.append(MeasuredMoves(steps, seconds, _transition_seconds(run.record, number)))
    return found


def _in_layout(run: ReshardRun, layout: int) -> PipelineRun:
    """The run as if there had been nothing but the steps in that layout."""
    record = run.record
    plans = [plan for plan in record.plans if plan.rows and plan.layout == layout]
    steps = {plan.step for plan in plans}
    part = Record(
        record.max_in_flight,
        record.arrivals,
        plans,
        submitted={step: record.submitted[step] for step in steps},
        handed_over={step: record.handed_over[step] for step in steps},
        results={step: record.results[step] for step in steps},
        known={step: record.known[step] for step in sorted(steps)},
    )
    times = tuple(times for times in run.stage_times if times.step in steps)
    return PipelineRun(run.outcome, part, times, run.preemptions)


def _swap_token_seconds(run: ReshardRun, layout: int, block_size: int) -> float:
    """Of a token, from plan to answer, of the swaps begun in that layout; those of a direction follow each other.

    A swap that follows its row begins when the step does. One that is answered with the step may have been over sooner:
    it counts only as what came before those of the same plan that took longer.
    """
    record = run.record
    answered = {swap: moment for moment, done in record.collected.items() for result in done for swap in result.swapped}
    computing = _computing_since(run)
    free: dict[str, float] = {}
    seconds, tokens = 0.0, 0
    for plan in record.plans:
        hidden = 0
        for swap in plan.swaps:
            begins = computing[plan.step] if swap.after_row else record.handed_over[plan.step]
            moved = hidden + len(swap.device_blocks) * block_size
            if swap.after_row and answered[swap.swap] <= record.known[plan.step]:
                hidden = moved
                continue
            began = max(begins, free.get(swap.direction, 0.0))
            free[swap.direction] = ended = answered[swap.swap]
            hidden = 0
            if plan.layout == layout:
                seconds += max(0.0, ended - began)
                tokens += moved
    return seconds / tokens if tokens else 0.0


def _computing_since(run: ReshardRun) -> dict[int, float]:
    """When the first worker began to compute, by step."""
    since: dict[int, float] = {}
    for times in run.stage_times:
        since[times.step] = min(times.started, since.get(times.step, times.started))
    return since


def _transition_seconds(record: Record, layout: int) -> float:
    """From plan to answer, in the mean of the changes to that layout."""
    changes = [plan.step for plan in record.plans if plan.transition == layout]
    return fmean(record.known[step] - record.handed_over[step] for step in changes) if changes else 0.0
