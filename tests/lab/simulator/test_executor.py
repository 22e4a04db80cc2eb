"""The Executor protocol on a virtual clock."""

import pytest

from nanoserve.lab.simulator.executor import DUMMY_TOKEN, END_TOKEN, SimulatedExecutor
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from tests.lab.simulator.linear_times import LinearTimes


def _prompt(step: int, sequence: int, *, answer: int = 3) -> StepPlan:
    begin = Begin(sequence, (1, 1), 2, 0, answer, SamplingParams())
    return StepPlan(step, begin=(begin,), rows=(Row(sequence, 0, (1, 1), True, (0,)),))


def test_time_passes_to_the_next_result_and_no_further_than_asked() -> None:
    executor = SimulatedExecutor(LinearTimes(num_stages=2))
    executor.submit(_prompt(0, sequence=0))
    executor.submit(_prompt(1, sequence=1))
    assert executor.collect(1.5) == []
    assert executor.now() == 1.5
    assert [result.step for result in executor.collect(None)] == [0]
    assert executor.now() == 2.0
    assert [result.step for result in executor.collect(9.0)] == [1]
    assert executor.now() == 3.0
    assert executor.collect(9.0) == []
    assert executor.now() == 9.0


def test_what_is_over_is_never_waited_for() -> None:
    executor = SimulatedExecutor(LinearTimes())
    executor.collect(5.0)
    assert executor.collect(2.0) == []
    assert executor.now() == 5.0


def test_waiting_for_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        SimulatedExecutor(LinearTimes()).collect(None)


def test_no_more_plans_are_taken_than_there_are_stages() -> None:
    executor = SimulatedExecutor(LinearTimes())
    executor.submit(_prompt(0, sequence=0))
    with pytest.raises(RuntimeError, match="plan 1: 1 plans are in flight already"):
        executor.submit(_prompt(1, sequence=1))


def test_an_answer_ends_after_as_many_tokens_as_its_seed_says_through_preemptions_too() -> None:
    executor = SimulatedExecutor(LinearTimes(), max_in_flight=9)
    executor.submit(_prompt(0, sequence=7, answer=3))
    executor.submit(StepPlan(1, rows=(Row(7, 2, (1,), True),)))
    again = Begin(7, (1, 1, 1, 1), 2, 0, 3, SamplingParams())
    executor.submit(StepPlan(2, end=(7,), begin=(again,), rows=(Row(7, 0, (1,), False, (0,)),)))
    executor.submit(StepPlan(3, rows=(Row(7, 1, (1, 1, 1), True),)))
    results = [result for _ in range(4) for result in executor.collect(None)]
    assert [[answer.tokens for answer in result.answers] for result in results] == [
        [(DUMMY_TOKEN,)],
        [(DUMMY_TOKEN,)],
        [],
        [(END_TOKEN,)],
    ]
