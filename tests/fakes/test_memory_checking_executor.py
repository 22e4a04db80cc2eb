"""The oracle is an executor too: it must notice what it is there to notice."""

import pytest

from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan, Swap
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor, MemoryViolation

GREEDY = SamplingParams(temperature=0)


def _begin(sequence: int, *tokens: int) -> Begin:
    return Begin(sequence, tokens, len(tokens), 0, 0, GREEDY)


def _executor() -> MemoryCheckingExecutor:
    return MemoryCheckingExecutor(4, 2, host_blocks=4, depth=99, model=lambda prefix, begin: 100 + len(prefix))


def test_a_block_given_to_two_sequences_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    stolen = StepPlan(1, begin=(_begin(1, 5, 6),), rows=(Row(1, 0, (5, 6), True, (0,)), Row(0, 2, (102,), True, (1,))))
    with pytest.raises(MemoryViolation, match="sequence 0, position 0"):
        executor.submit(stolen)


def test_writing_into_a_shared_block_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    shares = Row(1, 1, (9,), True, (0,))
    with pytest.raises(MemoryViolation, match="writes over block 0 of sequence 0"):
        executor.submit(StepPlan(1, begin=(_begin(1, 1, 9),), rows=(shares,)))


def test_reading_what_was_never_written_is_noticed() -> None:
    executor = _executor()
    with pytest.raises(MemoryViolation, match="position 0: block 3 slot 0 holds"):
        executor.submit(StepPlan(0, begin=(_begin(0, 1, 2, 3),), rows=(Row(0, 2, (3,), True, (3, 1)),)))


def test_reading_an_ended_sequences_last_block_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    executor.submit(StepPlan(1, rows=(Row(0, 2, (102,), True, (1,)),)))
    late = StepPlan(2, end=(0,), begin=(_begin(1, 1, 2, 102, 7),), rows=(Row(1, 3, (7,), True, (0, 1)),))
    with pytest.raises(MemoryViolation, match="position 2: block 1 slot 0"):
        executor.submit(late)


def test_a_second_begin_without_an_end_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1),)))
    with pytest.raises(MemoryViolation, match="begins twice"):
        executor.submit(StepPlan(1, begin=(_begin(0, 1),)))


def test_swaps_and_copies_move_what_blocks_hold() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    out = Swap(swap=7, sequence=0, direction="out", device_blocks=(0,), host_blocks=(3,))
    back = Swap(swap=8, sequence=0, direction="in", device_blocks=(1,), host_blocks=(3,))
    executor.submit(StepPlan(1, swaps=(out,)))
    executor.submit(StepPlan(2, swaps=(back,)))
    forked = (_begin(1, 1, 2, 9),)
    executor.submit(StepPlan(3, begin=forked, copies=(Copy(1, 2),), rows=(Row(1, 2, (9,), True, (2, 3)),)))
    results = [result for _ in range(4) for result in executor.collect(None)]
    assert [result.swapped for result in results] == [(), (7,), (8,), ()]
    assert results[-1].answers[0].tokens == (103,)


def test_guesses_are_accepted_as_far_as_they_are_right() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1),), rows=(Row(0, 0, (1,), True, (0,)),)))
    executor.submit(StepPlan(1, rows=(Row(0, 1, (101, 102, 103), True, (1,)),)))  # both guesses are right
    executor.submit(StepPlan(2, rows=(Row(0, 4, (104, 0, 106), True, (2, 3)),)))  # the first is wrong
    answers = [result.answers[0].tokens for _ in range(3) for result in executor.collect(None)]
    assert answers == [(101,), (102, 103, 104), (105,)]
