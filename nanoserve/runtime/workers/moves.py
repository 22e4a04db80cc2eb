"""Swaps and changes of layout: each is done when every worker has done its part."""

from nanoserve.record.times import ReshardTimes, SwapTimes
from nanoserve.scheduler.plan import StepPlan, StepResult


class Moves:
    """Those that are under way.

    Args:
        num_workers: that all take part.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._swaps: dict[int, int] = {}  # how many workers are not done with each
        self._resharded: list[ReshardTimes] = []  # by those that are done with the change of layout

    @property
    def swapping(self) -> bool:
        """Whether any swap is under way."""
        return bool(self._swaps)

    def begin(self, plan: StepPlan) -> None:
        """The plan's swaps are."""
        for swap in plan.swaps:
            self._swaps[swap.swap] = self._num_workers

    def end_part(self, times: ReshardTimes | SwapTimes) -> StepResult | None:
        """A worker has done its part; what is to be told if it was the last one."""
        if isinstance(times, ReshardTimes):
            self._resharded.append(times)
            if len(self._resharded) < self._num_workers:
                return None
            began, ended = min(one.began for one in self._resharded), max(one.ended for one in self._resharded)
            self._resharded.clear()
            return StepResult(times.step, seconds=ended - began)
        self._swaps[times.swap] -= 1
        if self._swaps[times.swap]:
            return None
        del self._swaps[times.swap]
        return StepResult(None, swapped=(times.swap,))

    def forget(self) -> None:
        """The workers are gone, and what they were about."""
        self._swaps.clear()
        self._resharded.clear()
