"""Micro-batches on their way through stages and links, each table worked out by hand."""

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.simulator.pipeline import COUPLED, DECOUPLED, Passage, Pipeline, Runtime
from nanoserve.scheduler.work import StepWork
from tests.lab.simulator.linear_times import LinearTimes

SHORT, LONG = StepWork.of([1]), StepWork.of([1] * 3)  # 2 and 4 seconds a stage


def test_a_stage_waits_for_what_arrives_and_for_what_it_computes() -> None:
    pipeline = Pipeline(LinearTimes(num_stages=2, decode=1.0, send=0.5), DECOUPLED)
    assert pipeline.run(SHORT, 0.0) == [Passage(0, 2), Passage(2.5, 4.5)]
    assert pipeline.run(LONG, 0.0) == [Passage(2, 6), Passage(6.5, 10.5)]
    # the bubble's other side: it queues
    assert pipeline.run(SHORT, 0.0) == [Passage(6, 8), Passage(10.5, 12.5)]
    assert pipeline.run(SHORT, 20.0) == [Passage(20, 22), Passage(22.5, 24.5)]
    assert pipeline.busy_seconds == [10, 10]


def test_a_link_carries_one_micro_batch_at_a_time() -> None:
    pipeline = Pipeline(LinearTimes(num_stages=2, send=3.0), DECOUPLED)
    assert pipeline.run(SHORT, 0.0)[1] == Passage(4, 5)
    assert pipeline.run(SHORT, 0.0)[1] == Passage(7, 8)  # left stage 0 at 2, the link at 7


def test_decoupled_metadata_is_prepared_while_the_stage_computes() -> None:
    pipeline = Pipeline(LinearTimes(num_stages=2, step=2.0, host=0.5), DECOUPLED)
    assert pipeline.run(SHORT, 0.0) == [Passage(0.5, 2.5), Passage(2.5, 4.5)]
    assert pipeline.run(SHORT, 0.0) == [Passage(2.5, 4.5), Passage(4.5, 6.5)]


def test_coupled_metadata_is_prepared_when_stage_and_activations_are_there() -> None:
    pipeline = Pipeline(LinearTimes(num_stages=2, step=2.0, host=0.5), Runtime(metadata="coupled"))
    assert pipeline.run(SHORT, 0.0) == [Passage(0.5, 2.5), Passage(3, 5)]
    assert pipeline.run(SHORT, 0.0) == [Passage(3, 5), Passage(5.5, 7.5)]


class SharedMemory(LinearTimes):
    """A stage that computes alone is twice as fast."""

    def lone_seconds(self, work: StepWork, stage: int) -> float:
        return self.stage_seconds(work, stage) / 2


def test_stages_share_the_memory_with_the_micro_batches_under_way() -> None:
    pipeline = Pipeline(SharedMemory(num_stages=2, decode=1.0), DECOUPLED)
    assert pipeline.run(LONG, 0.0) == [Passage(0, 2), Passage(2, 4)]  # alone
    assert pipeline.run(LONG, 2.0) == [Passage(2, 6), Passage(6, 10)]  # one like it is under way
    assert pipeline.run(SHORT, 20.0) == [Passage(20, 21), Passage(21, 22)]
    # one half as long: half of the time
    assert pipeline.run(LONG, 21.0) == [Passage(21, 24), Passage(24, 27)]
    assert pipeline.busy_seconds == [10, 10]


def test_a_coupled_stage_prepares_for_the_papers_share_of_its_time() -> None:
    pipeline = Pipeline(LinearTimes(step=0.83, host=9.0), COUPLED)
    ends = [pipeline.run(SHORT, 0.0)[0].end for _ in range(100)]
    assert ends[-1] == pytest.approx(100)
    assert 1 - pipeline.busy_seconds[0] / ends[-1] == pytest.approx(0.17)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_is_below_one(share: float) -> None:
    with pytest.raises(UsageError, match="preparation_share must be at least 0 and below 1"):
        Runtime(preparation_share=share)
