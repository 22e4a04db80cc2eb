"""Events of plans as a recorder makes them, for what is shown them one by one."""

from msgspec.structs import replace

from nanoserve.record.events import Blocks, Planned
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import draft_of
from nanoserve.scheduler.plan import StepPlan

NO_BLOCKS = Blocks(0, 1, 0, 0, 0, 0)


def step_tokens(plan: StepPlan) -> tuple[int, int]:
    """Rows of one token without its draft tokens, and tokens of longer rows, counted one by one."""
    lengths = [len(row.tokens) - draft_of(row).verify for row in plan.rows]
    return lengths.count(1), sum(lengths) - lengths.count(1)


def planned(plan: StepPlan, time: float, blocks: Blocks = NO_BLOCKS) -> Planned:
    """A plan that was made at that time."""
    decodes, prompt_tokens = step_tokens(plan)
    counted = replace(plan, decodes=decodes, prompt_tokens=prompt_tokens)
    return Planned(time, time, counted, None, Decision(0, 0), blocks)


def stage_times(step: int, *spans: tuple[float, float]) -> tuple[StageTimes, ...]:
    """Stages that compute the plan from when to when."""
    return tuple(
        StageTimes(step, stage, 0, start, start, start, start, end, end)
        for stage, (start, end) in enumerate(spans)
    )
