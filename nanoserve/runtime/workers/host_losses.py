"""When attention on the CPU fails in one stage: what the engine's side does so that all stages lose the same."""

from collections.abc import Iterable

import msgspec

from nanoserve.runtime.workers.messages import HostLost
from nanoserve.scheduler.plan import StepPlan, StepResult


class HostLosses:
    """Knows which host sequences are under way, and sees to it that none of them is heard of after a loss was told.

    Whatever stage reports it, a loss is one of the whole engine. When it is told, ahead of the next plan all stages are
    told to forget; but plans that were sent before may still answer host sequences which other stages had passed on.
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
        """Whether a loss is to be told."""
        return self._reason is not None

    def sent(self, plan: StepPlan) -> None:
        """A plan goes to the workers."""
        if plan.strategy != "device":
            self._under_way.update(row.sequence for row in plan.rows if row.tier == "host")

    def answered(self, result: StepResult) -> StepResult:
        """What may be told of a plan's result: nothing of host sequences that are lost."""
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
        """The loss, which is told now. All workers are to be sent ForgetHost ahead of the next plan.

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
