"""An executor whose workers die when a test says so: nothing of what they knew is left, and new
ones come."""

from collections.abc import Callable, Collection
from typing import Any

from nanoserve.scheduler.plan import Begin, Row, StepPlan, StepResult
from tests.fakes.memory_checking_executor import POISON, MemoryCheckingExecutor

CAUSE = "worker 1 was killed by SIGKILL"


class DyingExecutor(MemoryCheckingExecutor):
    """A MemoryCheckingExecutor that loses everything at some of its calls, `submit` and `collect`
    counted together.

    Args:
        deaths: the numbers of these calls. In a `submit` the plan is the first that nobody runs; in
            a `collect` what was known before is told, and the loss by the next one.
        ran: seconds that workers are said to have run when they die, 0 for workers that were still
            starting.
        kills: whether a row of a sequence that began so kills the workers that compute it.
        settings: those of the MemoryCheckingExecutor.
    """

    def __init__(
        self,
        *sizes: int,
        deaths: Collection[int] = (),
        ran: float = 3600.0,
        kills: Callable[[Begin, Row], bool] = lambda begin, row: False,
        **settings: Any,
    ) -> None:
        super().__init__(*sizes, **settings)
        self.ran = ran
        self._kills = kills
        self._begun: dict[int, Begin] = {}
        self._deaths = frozenset(deaths)
        self._calls = 0
        self.dead = False  # the loss is reported by the next collect that knows nothing else
        self.losses = 0
        self.reported_losses = 0

    def submit(self, plan: StepPlan) -> None:
        self._begun |= {begin.sequence: begin for begin in plan.begin}
        if self._dies_now() or any(
            self._kills(self._begun[row.sequence], row) for row in plan.rows
        ):
            self.die()
        if self.dead:  # plans wait for new workers, and are lost with the news
            self.plans.append(plan)
        else:
            super().submit(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        known = super().collect(until)
        if self._dies_now():
            self.die()
        if known or not self.dead:
            return known
        self.dead = False
        self.reported_losses += 1
        return [StepResult(None, lost=CAUSE, ran=self.ran)]

    def _dies_now(self) -> bool:
        self._calls += 1
        return self._calls in self._deaths

    def die(self) -> None:
        """Every block holds nothing, and nobody knows of any sequence; a layout that nobody heard
        of is not there."""
        transition = (
            self.plans[-1].layouts.transition is not None if self._results and self.plans else False
        )
        if transition:
            self._layout = self.plans[-1].layouts.current
        self.forget_what_is_in_flight()
        self._records.clear()
        if self.states is not None:
            self.states.lose()
        blocks = {"device": self._layouts[self._layout], "host": len(self._memory["host"])}
        for tier in self._memory:
            self._memory[tier] = [[POISON] * self.block_size for _ in range(blocks[tier])]
        self.dead = True
        self.losses += 1
