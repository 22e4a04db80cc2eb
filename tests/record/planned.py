"""Events of plans as a recorder makes them, for what is shown them one by one."""

from nanoserve.record.events import Blocks, Planned
from nanoserve.record.recorder import step_tokens
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.plan import StepPlan

NO_BLOCKS = Blocks(0, 1, 0, 0, 0, 0)


def planned(plan: StepPlan, time: float, blocks: Blocks = NO_BLOCKS) -> Planned:
    """A plan that was made at that time."""
    return Planned(time, time, plan, None, Decision(0, 0), blocks, None, *step_tokens(plan))


def stage_times(step: int, *spans: tuple[float, float]) -> tuple[StageTimes, ...]:
    """Stages that compute the plan from when to when."""
    return tuple(
        StageTimes(step, stage, 0, start, start, start, start, end, end) for stage, (start, end) in enumerate(spans)
    )
