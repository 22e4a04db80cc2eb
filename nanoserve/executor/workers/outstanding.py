"""Work that several workers share: host sequences that fail in one stage, swaps, changes of
layout."""

from collections.abc import Iterable

import msgspec

from nanoserve.executor.workers.messages import HostLost
from nanoserve.record.times import ReshardTimes, SwapTimes
from nanoserve.scheduler.optional import HostResult
from nanoserve.scheduler.plan import StepPlan, StepResult


class HostLosses:
    """Host sequences under way. After a loss it drops what plans sent before still answer for them.

    A loss in one stage is a loss of the whole engine. Once it is reported, all stages are sent
    ForgetHost ahead of the next plan; but earlier plans may still answer host sequences that other
    stages had passed on.
    """

    def __init__(self) -> None:
        self._told = 0
        self._reason: str | None = None
        self._under_way: set[int] = set()
        # sequences, by plan that was in flight when they were lost
        self._silenced: dict[int, set[int]] = {}

    @property
    def pending(self) -> bool:
        return self._reason is not None

    def sent(self, plan: StepPlan) -> None:
        if plan.host.strategy != "device":
            self._under_way.update(row.sequence for row in plan.rows if row.host is not None)

    def answered(self, result: StepResult) -> StepResult:
        """A plan's result, without answers for lost host sequences."""
        if result.step in self._silenced:
            silenced = self._silenced.pop(result.step)
            heard = tuple(answer for answer in result.answers if answer.sequence not in silenced)
            result = msgspec.structs.replace(
                result, answers=heard, host=msgspec.structs.replace(result.host, cohorts=())
            )
        if self._under_way:
            self._under_way.difference_update(answer.sequence for answer in result.answers)
        return result

    def heard(self, lost: HostLost) -> None:
        """Note a loss. If the worker has not heard of the last one yet, it is the same loss."""
        if lost.forgotten == self._told and self._reason is None:
            self._reason = f"worker {lost.rank}: {lost.reason}"

    def tell(self, in_flight: Iterable[int]) -> StepResult:
        """The loss as a result; `in_flight` are the plans that have not ended. Send all workers
        ForgetHost ahead of the next plan."""
        result = StepResult(None, host=HostResult(lost=self._reason))
        self._told += 1
        self._reason = None
        for step in in_flight:
            self._silenced[step] = self._silenced.get(step, set()) | self._under_way
        self._under_way = set()
        return result


class Moves:
    """The swaps and the change of layout that are under way; all workers take part in each."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._swaps: dict[int, int] = {}  # by swap: how many workers are not done with it
        # times of the workers that are done with the change of layout
        self._resharded: list[ReshardTimes] = []

    @property
    def swapping(self) -> bool:
        return bool(self._swaps)

    def begin(self, plan: StepPlan) -> None:
        for swap in plan.host.swaps:
            self._swaps[swap.swap] = self._num_workers

    def end_part(self, times: ReshardTimes | SwapTimes) -> StepResult | None:
        """Note that a worker has done its part; returns the result if it was the last one."""
        if isinstance(times, ReshardTimes):
            self._resharded.append(times)
            if len(self._resharded) < self._num_workers:
                return None
            began, ended = (
                min(one.began for one in self._resharded),
                max(one.ended for one in self._resharded),
            )
            self._resharded.clear()
            return StepResult(times.step, seconds=ended - began)
        self._swaps[times.swap] -= 1
        if self._swaps[times.swap]:
            return None
        del self._swaps[times.swap]
        return StepResult(None, host=HostResult(swapped=(times.swap,)))
