"""MovingExecutor: a simulated engine with several layouts that tells, as worker processes do, what each worker did."""

from collections.abc import Sequence

from nanoserve.costs.work import StepWork
from nanoserve.runtime.trace.stage_times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.scheduler.plan import StepPlan, StepResult, Swap
from nanoserve.simulator.pipeline import MovingTimes, Passage
from nanoserve.simulator.tiered_executor import TieredExecutor
from tests.fakes.observed_executor import dummy_answers

KV_BYTES, WEIGHT_BYTES = 64, 4096
"""Of a worker: for each token of a swap, and of its slices of the weights."""


class MovingExecutor(TieredExecutor):
    """In virtual time, which begins at ``began``; workers compute from the moment at which the work is there.

    Args:
        layouts: their times; stages times tensor-parallel ranks is the number of workers in each.
        workers: how many there are.
    """

    def __init__(
        self, layouts: Sequence[MovingTimes], *, block_size: int, workers: int = 2, began: float = 1000.0
    ) -> None:
        super().__init__(layouts, block_size=block_size, answer=dummy_answers, observers=[self], tier_observers=[self])
        self._began = began
        self._workers = workers
        self._times_taken: list[StageTimes] = []
        self._moves_taken: list[ReshardTimes | SwapTimes] = []
        self._free = [0.0] * workers

    @property
    def layout(self) -> int:
        """The one that runs, or that a transition in flight leads to."""
        return self._layout

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A plan enters the pipeline: what becomes of it is known at once."""
        arrived, ranks = now, self._workers // len(passages)
        for stage, passage in enumerate(passages):
            for rank in range(stage * ranks, (stage + 1) * ranks):
                free = max(self._free[rank], now)
                moments = (now, now, free, max(arrived, free), passage.end, passage.end)
                self._times_taken.append(
                    StageTimes(plan.step, rank, work.tokens, *(self._began + moment for moment in moments))
                )
                self._free[rank] = passage.end
            arrived = passage.end

    def on_swap(self, now: float, swap: Swap, tokens: int, passage: Passage) -> None:
        """A swap is submitted."""
        span = [self._began + moment for moment in passage]
        for rank in range(self._workers):
            self._moves_taken.append(SwapTimes(swap.swap, rank, swap.direction, KV_BYTES * tokens, *span))

    def on_transition(self, now: float, plan: StepPlan, passage: Passage) -> None:
        """The layout changes."""
        assert plan.transition is not None
        span = [self._began + moment for moment in passage]
        for rank in range(self._workers):
            self._moves_taken.append(ReshardTimes(plan.step, rank, plan.transition, WEIGHT_BYTES, *span))

    def on_host_attention(self, passage: Passage, seconds: float, rows: int) -> None:
        """Nothing attends on the host here."""

    def take_times(self) -> list[StageTimes]:
        """Since the last call."""
        taken, self._times_taken = self._times_taken, []
        return taken

    def take_moves(self) -> list[ReshardTimes | SwapTimes]:
        """Since the last call."""
        taken, self._moves_taken = self._moves_taken, []
        return taken

    def now(self) -> float:
        return self._began + super().now()

    def collect(self, until: float | None) -> list[StepResult]:
        return super().collect(None if until is None else until - self._began)
