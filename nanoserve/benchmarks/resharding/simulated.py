"""A real run with two layouts, and the simulator given what its steps and moves took: do they agree? No torch."""

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from nanoserve.benchmarks.pipeline.simulated import answers, measured_steps, rerun
from nanoserve.benchmarks.resharding.running import Place
from nanoserve.engine import Engine
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.measured_stages import MeasuredStages, MeasuredStep
from nanoserve.simulator.replay import replay
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
    record: RunRecord, place: Place, make_scheduler: Callable[[], Scheduler], *, vocab_size: int
) -> ReshardComparison | None:
    """Replay the record, and simulate the requests in the times that steps and moves of the run took.

    Returns:
        None where a layout computed nothing: nobody knows what that would take.

    Args:
        record: of a run at that place.
        make_scheduler: makes one as the run had.

    Raises:
        ValueError: if the replay makes other plans.
    """
    replayed = replay(record, make_scheduler, vocab_size=vocab_size)
    layouts = measured_layouts(record, place)
    if len(layouts) < len(place.layouts):
        return None
    executor = TieredExecutor(layouts, block_size=place.block_size, answer=answers)
    simulated = rerun(Engine(make_scheduler(), executor, vocab_size=vocab_size), record)
    return ReshardComparison(
        makespan=simulated.makespan / record.makespan,
        simulated_seconds=simulated.makespan,
        simulated_transitions=sum(plan.transition is not None for plan in simulated.plans),
        plans=len(record.plans),
        replayed=len(replayed),
        others=sum(layout.others for layout in layouts),
    )


def measured_layouts(record: RunRecord, place: Place) -> list[MeasuredMoves]:
    """The times of each layout that computed anything."""
    found = []
    for number, layout in enumerate(place.layouts):
        part = record.only([plan for plan in record.plans if plan.rows and plan.layout == number])
        if not part.plans:
            continue
        steps = measured_steps(part, layout.tensor_parallel)
        seconds = _swap_token_seconds(record, number, place.block_size)
        found.append(MeasuredMoves(steps, seconds, _transition_seconds(record, number)))
    return found


def _swap_token_seconds(record: RunRecord, layout: int, block_size: int) -> float:
    """Of a token, from plan to answer, of the swaps begun in that layout; those of a direction follow each other.

    A swap that follows its row begins when the step does. One that is answered with the step may have been over sooner:
    it counts only as what came before those of the same plan that took longer.
    """
    answered = {swap: moment for moment, done in record.collected.items() for result in done for swap in result.swapped}
    computing = _computing_since(record)
    free: dict[str, float] = {}
    seconds, tokens = 0.0, 0
    for plan in record.plans:
        hidden = 0
        for swap in plan.swaps:
            begins = computing[plan.step] if swap.after_row else record.planned[plan.step].time
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


def _computing_since(record: RunRecord) -> dict[int, float]:
    """When the first worker began to compute, by step."""
    since: dict[int, float] = {}
    for times in record.stage_times:
        since[times.step] = min(times.started, since.get(times.step, times.started))
    return since


def _transition_seconds(record: RunRecord, layout: int) -> float:
    """From plan to answer, in the mean of the changes to that layout."""
    changes = [plan.step for plan in record.plans if plan.transition == layout]
    return fmean(record.known[step] - record.planned[step].time for step in changes) if changes else 0.0
