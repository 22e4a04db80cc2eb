"""What the steps of a run achieved against the floor of their bytes and operations, and the engine's share."""

import statistics
from collections.abc import Sequence

import msgspec

from nanoserve.benchmarks.driving import StepRecord
from nanoserve.benchmarks.floors import STEP_KINDS, Limits, ModelCost
from nanoserve.measures.metrics import MILLISECONDS, Distribution

GIGA = 1e9
ALL = "all"


class StepSummary(msgspec.Struct, frozen=True):
    """Steps of one kind; rates and shares are of their sums, so that long steps weigh more."""

    steps: int
    """Number of steps."""
    step_ms: Distribution | None
    """Durations of the steps, in milliseconds."""
    read_gb_per_s: float
    gflops: float
    """The bytes and the operations that they cannot do without, over their durations."""
    of_floor: float | None
    """The sum of their floors over the sum of their durations; 1 is the floor itself."""
    step_of_floor: Distribution | None
    """The same share, step by step. Both are None where the machine's limits are not known."""
    engine_ms: float
    """The engine's own time per step, in the median."""
    engine_share: float
    """Its sum over the sum of their durations."""

    @classmethod
    def of(cls, steps: Sequence[StepRecord], cost: ModelCost, limits: Limits | None) -> "StepSummary":
        """Summarize at least one step."""
        seconds = sum(step.step_seconds for step in steps)
        floors = [] if limits is None else [cost.floor_seconds(step.shape, limits) for step in steps]
        shares = [floor / step.step_seconds for floor, step in zip(floors, steps, strict=False)]
        return cls(
            steps=len(steps),
            step_ms=Distribution.of(step.step_seconds * MILLISECONDS for step in steps),
            read_gb_per_s=sum(cost.step_bytes(step.shape) for step in steps) / seconds / GIGA,
            gflops=sum(cost.step_operations(step.shape) for step in steps) / seconds / GIGA,
            of_floor=sum(floors) / seconds if floors else None,
            step_of_floor=Distribution.of(shares),
            engine_ms=statistics.median(step.engine_seconds for step in steps) * MILLISECONDS,
            engine_share=sum(step.engine_seconds for step in steps) / seconds,
        )


def summarize_steps(steps: Sequence[StepRecord], cost: ModelCost, limits: Limits | None) -> dict[str, StepSummary]:
    """For each kind of step that occurred, and under "all" for all of them."""
    kinds = {kind: [step for step in steps if step.shape.kind == kind] for kind in STEP_KINDS}
    return {name: StepSummary.of(some, cost, limits) for name, some in [*kinds.items(), (ALL, list(steps))] if some}
