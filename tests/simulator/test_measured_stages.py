"""Measured micro-batches take what they took; others, what their tokens suggest."""

import pytest

from nanoserve.costs.work import StepWork
from nanoserve.simulator.measured_stages import MeasuredStages, MeasuredStep


def _step(work: StepWork, seconds: float) -> MeasuredStep:
    return MeasuredStep(work, (seconds, 2 * seconds), (seconds / 10,), seconds / 100)


def test_equal_micro_batches_take_their_mean() -> None:
    work = StepWork.of([4, 5], [(0, 8)])
    times = MeasuredStages([_step(work, 1.0), _step(StepWork.of([9]), 7.0), _step(work, 3.0)])
    asked = times.work([4, 5], [(0, 8)])
    assert [times.stage_seconds(asked, stage) for stage in range(times.num_stages)] == [2.0, 4.0]
    assert (times.send_seconds(asked, 0), times.host_seconds(asked)) == pytest.approx((0.2, 0.02))
    assert times.unmeasured == 0


def test_others_lie_on_the_line_between_numbers_of_tokens() -> None:
    times = MeasuredStages([_step(StepWork.of([4]), 1.0), _step(StepWork.of([4] * 5), 3.0)])
    between = times.work([4, 4, 4])
    assert times.stage_seconds(between, 1) == pytest.approx(4.0)
    assert times.unmeasured == 1


def test_one_number_of_tokens_says_nothing_of_others() -> None:
    times = MeasuredStages([_step(StepWork.of([4]), 1.0), _step(StepWork.of([5]), 2.0)])
    assert times.stage_seconds(times.work([4] * 9), 0) == pytest.approx(1.5)
