"""An executor whose attention on the CPU dies when a test says so: what host sequences had under
way never comes."""

from collections.abc import Collection
from itertools import chain
from typing import Any

from msgspec.structs import replace

from nanoserve.scheduler.optional import HostResult
from nanoserve.scheduler.plan import StepPlan, StepResult
from tests.fakes.dying_executor import DyingExecutor
from tests.fakes.memory_checking_executor import POISON

HOST_CAUSE = "the thread that attends on the CPU was killed"


class HostLosingExecutor(DyingExecutor):
    """A DyingExecutor that also loses what host sequences have at some of its calls, `submit` and
    `collect` counted.

    Args:
        host_losses: the numbers of these calls. In a `collect` what was known before comes along:
            of odd calls in the result that tells of the loss, of even ones in a result before it.
            After a loss in a `submit`, the next result to come is already one without the tokens of
            host sequences.
        settings: those of the DyingExecutor.
    """

    def __init__(self, *sizes: int, host_losses: Collection[int] = (), **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self._host_losses = frozenset(host_losses)
        self._host_dead = False
        self.times_host_was_lost = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if self._calls in self._host_losses:
            self.host_dies()

    def host_dies(self) -> None:
        """The next result tells of it."""
        self._host_dead = True

    def collect(self, until: float | None) -> list[StepResult]:
        if self._host_dead:
            self._forget_host_tokens()
        known = super().collect(until)
        if any(result.lost is not None for result in known):  # all is gone, the host's part too
            self._host_dead = False
            return known
        if not self._host_dead and self._calls not in self._host_losses:
            return known
        return self._lose_host(known)

    def _lose_host(self, known: list[StepResult]) -> list[StepResult]:
        self._host_dead = False
        self.times_host_was_lost += 1
        self._forget_host_tokens()
        for block in set(range(len(self._memory["host"]))) - self._moving_blocks():
            self._memory["host"][block] = [POISON] * self.block_size
        if known and self._calls % 2:
            return [*known[:-1], replace(known[-1], host=replace(known[-1].host, lost=HOST_CAUSE))]
        return [*known, StepResult(None, host=HostResult(lost=HOST_CAUSE))]

    def _moving_blocks(self) -> set[int]:
        """Host blocks of sequences on their way; of a prompt that was parked, until the executor is
        to forget it."""
        moving = [one.swap for one in self._swaps]
        for plan in self.plans:
            moving += [
                swap
                for swap in plan.host.swaps
                if swap.after_row and swap.sequence in self._records
            ]
        return set(chain.from_iterable(swap.host_blocks for swap in moving))

    def _forget_host_tokens(self) -> None:
        """Forget those of cohorts, and of plans that are not answered yet."""
        self._cohorts.clear()
        on_host = {sequence for sequence, record in self._records.items() if record.tier == "host"}
        for index, result in enumerate(self._results):
            answers = tuple(answer for answer in result.answers if answer.sequence not in on_host)
            self._results[index] = replace(
                result, answers=answers, host=replace(result.host, cohorts=())
            )
