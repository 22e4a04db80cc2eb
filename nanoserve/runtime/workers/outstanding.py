"""What workers owe in common: host sequences whose attention fails in one stage, swaps and changes of layout."""

from collections.abc import Iterable

import msgspec

from nanoserve.record.times import ReshardTimes, SwapTimes
from nanoserve.runtime.workers.messages import HostLost
from nanoserve.scheduler.plan import StepPlan, StepResult


class HostLosses:
    """Knows which host sequences are under way, and drops what is answered for them after a loss was reported.

    A loss in one stage is a loss of the whole engine. Once it is reported, all stages are sent ForgetHost ahead of the
    next plan; but plans that were sent before may still answer host sequences which other stages had passed on.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The workers are gone, and new ones know of nothing."""
        self._told = 0
        self._reason: str | None = None
        self._under_way: set[int] = set()
        self._silenced: dict[int, set[int]] = {}  # sequences, by plan that was in flight when they were lost

    @property
    def pending(self) -> bool:
        """Whether a loss is to be reported."""
        return self._reason is not None

    def sent(self, plan: StepPlan) -> None:
        """A plan goes to the workers."""
        if plan.strategy != "device":
            self._under_way.update(row.sequence for row in plan.rows if row.tier == "host")

    def answered(self, result: StepResult) -> StepResult:
        """A plan's result without the host sequences that are lost."""
        if result.step in self._silenced:
            silenced = self._silenced.pop(result.step)
            heard = tuple(answer for answer in result.answers if answer.sequence not in silenced)
            result = msgspec.structs.replace(result, answers=heard, cohorts=())
        if self._under_way:
            self._under_way.difference_update(answer.sequence for answer in result.answers)
        return result

    def heard(self, lost: HostLost) -> None:
        """A worker says so. If it has not heard of the last loss yet, this one is a part of that."""
        if lost.forgotten == self._told and self._reason is None:
            self._reason = f"worker {lost.rank}: {lost.reason}"

    def tell(self, in_flight: Iterable[int]) -> StepResult:
        """Report the loss. All workers are to be sent ForgetHost ahead of the next plan.

        Args:
            in_flight: plans that have not ended.
        """
        result = StepResult(None, host_lost=self._reason)
        self._told += 1
        self._reason = None
        for step in in_flight:
            self._silenced[step] = self._silenced.get(step, set()) | self._under_way
        self._under_way = set()
        return result


class Moves:
    """The swaps and the change of layout that are under way.

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
        """A worker has done its part; the result, if it was the last one."""
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
