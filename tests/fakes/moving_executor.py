"""MovingExecutor: a simulated engine with several layouts that tells, as worker processes do, what
each worker did."""

from collections.abc import Iterator, Sequence

import msgspec

from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.pipeline import MovingTimes, Passage
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes, Times
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.work import StepWork
from tests.fakes.observed_executor import dummy_answers

KV_BYTES, WEIGHT_BYTES = 64, 4096
"""Bytes of a worker: for each token of a swap, and for its slices of the weights."""


class MovingExecutor(SimulatedExecutor):
    """In virtual time, which begins at ``began``; workers compute from the moment at which the work
    is there.

    Args:
        layouts: their times; stages times tensor-parallel ranks is the number of workers in each.
        workers: how many there are.
    """

    def __init__(
        self,
        layouts: Sequence[MovingTimes],
        *,
        block_size: int,
        workers: int = 2,
        began: float = 1000.0,
    ) -> None:
        super().__init__(*layouts, block_size=block_size, answer=dummy_answers)
        self._began = began
        self._workers = workers
        self._swapped: dict[int, int] = {}  # by swap: the bytes of a worker
        self._free = [0.0] * workers

    @property
    def layout(self) -> int:
        """The one that runs, or that a transition in flight leads to."""
        return self._layout

    def submit(self, plan: StepPlan) -> None:
        """Note how much its swaps move."""
        for swap in plan.host.swaps:
            self._swapped[swap.swap] = KV_BYTES * len(swap.device_blocks) * self._block_size
        super().submit(plan)

    def _tell(self, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        now = self._now
        arrived, ranks = now, self._workers // len(passages)
        for stage, passage in enumerate(passages):
            for rank in range(stage * ranks, (stage + 1) * ranks):
                free = max(self._free[rank], now)
                moments = (now, now, free, max(arrived, free), passage.end, passage.end)
                self._told.append(
                    StageTimes(
                        plan.step, rank, work.tokens, *(self._began + moment for moment in moments)
                    )
                )
                self._free[rank] = passage.end
            arrived = passage.end

    def take_times(self) -> list[Times]:
        """Every worker takes part in every move."""
        return [one for times in super().take_times() for one in self._of_workers(times)]

    def _of_workers(self, times: Times) -> Iterator[Times]:
        if not isinstance(times, ReshardTimes | SwapTimes):
            yield times
            return
        size = WEIGHT_BYTES if isinstance(times, ReshardTimes) else self._swapped[times.swap]
        span = {"began": self._began + times.began, "ended": self._began + times.ended}
        for rank in range(self._workers):
            yield msgspec.structs.replace(times, rank=rank, num_bytes=size, **span)

    def now(self) -> float:
        return self._began + super().now()

    def collect(self, until: float | None) -> list[StepResult]:
        return super().collect(None if until is None else until - self._began)
