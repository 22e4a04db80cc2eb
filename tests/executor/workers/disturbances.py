"""Disturbs workers with two layouts while they are in a phase of their work."""

import os
import signal
from collections.abc import Callable

import pytest

from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.scheduler.plan import StepPlan, StepResult
from tests.executor.workers.loads import TIGHT_BLOCKS, Case, Reference

CASE = Case("minimizing", token_budget=24, num_blocks=TIGHT_BLOCKS, host_blocks=24, seed=1)
PHASES: dict[str, Callable[[StepPlan], bool]] = {
    "prefilling": lambda plan: (
        plan.layouts.current == 0 and any(len(row.tokens) > 1 for row in plan.rows)
    ),
    "swapping out": lambda plan: any(swap.direction == "out" for swap in plan.host.swaps),
    "to decode": lambda plan: plan.layouts.transition == 1,
    "swapping in": lambda plan: any(swap.direction == "in" for swap in plan.host.swaps),
    "decoding": lambda plan: plan.layouts.current == 1 and bool(plan.rows),
    "to prefill": lambda plan: plan.layouts.transition == 0 and plan.step >= 0,
}


class Pair:
    """Workers with two layouts, and their processes."""

    def __init__(self, executor: WorkersExecutor, reference: Reference) -> None:
        self.executor = executor
        self.reference = reference

    @property
    def processes(self) -> list[int]:
        """By rank."""
        assert self.executor._group is not None
        return [child.process.pid for child in self.executor._group._children.values()]

    def send(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank], number)

    def live_while(
        self, phase: str, disturb: Callable[[], None], *, number: int = 2, losses: int = 1
    ) -> None:
        """Live through the case; before the so many-th plan of the phase is sent, all workers are
        stopped, and behind it they are disturbed: none of them can have done its part. They are
        told to go on only by being killed."""
        executor, lost, met = self.executor, 0, 0
        submit, collect = executor.submit, executor.collect

        def submitting(plan: StepPlan) -> None:
            nonlocal met
            met += PHASES[phase](plan)
            if met != number or not PHASES[phase](plan):
                submit(plan)
                return
            for process in self.processes:
                os.kill(process, signal.SIGSTOP)
            submit(plan)
            disturb()

        def collecting(until: float | None) -> list[StepResult]:
            nonlocal lost
            results = collect(until)
            lost += sum(result.lost is not None for result in results)
            return results

        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(executor, "submit", submitting)
            patch.setattr(executor, "collect", collecting)
            seen = self.reference.check(executor, [CASE])
        assert met >= number and lost == losses
        assert seen.transitions >= 2
