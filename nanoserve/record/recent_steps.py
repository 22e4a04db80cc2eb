"""RecentSteps: a summary of an engine's last steps, as a server logs and counts them."""

from collections import deque
from collections.abc import Sequence

from nanoserve.record.counters import RecentStep
from nanoserve.record.engine_observer import EngineObserver
from nanoserve.scheduler.plan import StepResult
from nanoserve.scheduler.scheduler import Scheduler

MOST_RECENT_STEPS = 32


class RecentSteps(EngineObserver):
    """Keeps the last `MOST_RECENT_STEPS` steps that have ended and were not taken yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[RecentStep] = deque(maxlen=MOST_RECENT_STEPS)

    def on_results(self, results: Sequence[StepResult]) -> None:
        scheduler = self._scheduler
        for result in results:
            plan = scheduler.plans_in_flight.get(result.step)  # its result is not applied yet
            if plan is not None:
                running, waiting = len(scheduler.running), len(scheduler.waiting)
                step = RecentStep(
                    plan.step, plan.decodes, plan.prompt_tokens, running, waiting, result.seconds
                )
                self._steps.append(step)

    def take(self) -> list[RecentStep]:
        """Return the steps that have ended since the last call."""
        steps = list(self._steps)
        self._steps.clear()
        return steps
