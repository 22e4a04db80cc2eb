"""The words that pass between scheduler and executors."""

import msgspec

from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan


def test_a_plan_crosses_to_another_process_as_typed_msgpack() -> None:
    begin = Begin(3, (1, 2), 2, 0, 5, SamplingParams(logit_bias={1: 2.0}, stop=("x",)), (0,))
    rows = (Row(3, 0, (1, 2), True, (4,)), Row(5, 7, (0,), True, fed=True))
    plan = StepPlan(7, begin=(begin,), rows=rows, copies=(Copy(1, 2),), end=(9,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
