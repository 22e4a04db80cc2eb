"""The oracle is an executor too: it must notice what it is there to notice."""

import pytest

from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import (
    CohortProgress,
    DraftRow,
    HostPlan,
    HostRow,
    LayoutPlan,
    Swap,
)
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor, MemoryViolation

GREEDY = SamplingParams(temperature=0)


def _begin(sequence: int, *tokens: int) -> Begin:
    return Begin(sequence, tokens, len(tokens), 0, 0, GREEDY)


def _executor() -> MemoryCheckingExecutor:
    return MemoryCheckingExecutor(
        4, 2, host_blocks=4, depth=99, model=lambda prefix, begin: 100 + len(prefix)
    )


def test_a_block_given_to_two_sequences_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    stolen = StepPlan(
        1,
        begin=(_begin(1, 5, 6),),
        rows=(Row(1, 0, (5, 6), True, (0,)), Row(0, 2, (102,), True, (1,))),
    )
    with pytest.raises(MemoryViolation, match=r"sequence 0: block 0 slot 0 holds \(5, 0"):
        executor.submit(stolen)


def test_writing_into_a_shared_block_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    shares = Row(1, 1, (9,), True, (0,))
    with pytest.raises(MemoryViolation, match="writes over block 0 of sequence 0"):
        executor.submit(StepPlan(1, begin=(_begin(1, 1, 9),), rows=(shares,)))


def test_reading_what_was_never_written_is_noticed() -> None:
    executor = _executor()
    with pytest.raises(MemoryViolation, match="block 3 slot 0 holds"):
        executor.submit(
            StepPlan(0, begin=(_begin(0, 1, 2, 3),), rows=(Row(0, 2, (3,), True, (3, 1)),))
        )


def test_reading_an_ended_sequences_last_block_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    executor.submit(StepPlan(1, rows=(Row(0, 2, (102,), True, (1,)),)))
    late = StepPlan(
        2, end=(0,), begin=(_begin(1, 1, 2, 102, 7),), rows=(Row(1, 3, (7,), True, (0, 1)),)
    )
    with pytest.raises(MemoryViolation, match="sequence 1: block 1 slot 0 holds"):
        executor.submit(late)


def test_a_second_begin_without_an_end_is_noticed() -> None:
    executor = _executor()
    row = Row(0, 0, (1,), True, (0,))
    executor.submit(StepPlan(0, begin=(_begin(0, 1),), rows=(row,)))
    with pytest.raises(MemoryViolation, match="begins twice"):
        executor.submit(StepPlan(1, begin=(_begin(0, 1),), rows=(row,)))


def test_swaps_and_copies_move_what_blocks_hold() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    out = Swap(swap=7, sequence=0, direction="out", device_blocks=(0,), host_blocks=(3,))
    back = Swap(swap=8, sequence=0, direction="in", device_blocks=(1,), host_blocks=(3,))
    executor.submit(StepPlan(1, end=(0,), host=HostPlan(swaps=(out,))))
    results = executor.collect(None)
    executor.submit(StepPlan(2, host=HostPlan(swaps=(back,))))
    results += executor.collect(None)
    forked = (_begin(1, 1, 2, 9),)
    executor.submit(
        StepPlan(3, begin=forked, copies=(Copy(1, 2),), rows=(Row(1, 2, (9,), True, (2, 3)),))
    )
    results += executor.collect(None)
    assert [(result.step, result.host.swapped) for result in results] == [
        (0, ()),
        (None, (7,)),
        (None, (8,)),
        (3, ()),
    ]
    assert results[-1].answers[0].tokens == (103,)


def _swapping_out() -> MemoryCheckingExecutor:
    """Sequence 0 is on its way from device block 0 to host block 3."""
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    executor.submit(StepPlan(1, end=(0,), host=HostPlan(swaps=(Swap(7, 0, "out", (0,), (3,)),))))
    return executor


def test_writing_what_a_swap_reads_is_noticed() -> None:
    executor = _swapping_out()
    executor.submit(StepPlan(2, begin=(_begin(1, 5),), rows=(Row(1, 0, (5,), True, (0,)),)))
    with pytest.raises(MemoryViolation, match="device block 0 was written while swap 7 read it"):
        executor.collect(None)


def test_using_what_a_swap_writes_is_noticed() -> None:
    executor = _swapping_out()
    early = Row(0, 2, (102,), True, (3, 1), host=HostRow())
    with pytest.raises(MemoryViolation, match="sequence 0 has a row where it is not"):
        executor.submit(
            StepPlan(
                2, begin=(_begin(0, 1, 2, 102),), rows=(early,), host=HostPlan(strategy="overlap")
            )
        )
    other = _swapping_out()
    with pytest.raises(MemoryViolation, match="host block 3, which another swap moves"):
        other.submit(StepPlan(2, host=HostPlan(swaps=(Swap(8, 1, "out", (1,), (3,)),))))


def test_a_swap_behind_a_row_moves_what_the_row_wrote_and_is_refused_without_it() -> None:
    executor = _executor()
    parked = Swap(7, 0, "out", (0, 2), (3, 1), after_row=True)
    executor.submit(
        StepPlan(
            0,
            begin=(_begin(0, 1, 2, 3),),
            rows=(Row(0, 0, (1, 2, 3), True, (0, 2)),),
            host=HostPlan(swaps=(parked,)),
        )
    )
    executor.collect(None)
    on_host = Row(0, 3, (103,), True, (3, 1), host=HostRow())
    executor.submit(
        StepPlan(
            1,
            end=(0,),
            begin=(_begin(0, 1, 2, 3, 103),),
            rows=(on_host,),
            host=HostPlan(strategy="asymmetric"),
        )
    )
    (result,) = executor.collect(None)
    assert result.answers[0].tokens == (104,)
    with pytest.raises(MemoryViolation, match="follows no row"):
        _executor().submit(StepPlan(0, host=HostPlan(swaps=(parked,))))
    with pytest.raises(MemoryViolation, match="other blocks"):
        _executor().submit(
            StepPlan(
                0,
                begin=(_begin(0, 1),),
                rows=(Row(0, 0, (1,), True, (0,)),),
                host=HostPlan(swaps=(parked,)),
            )
        )


def test_a_transition_with_anything_on_the_device_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    with pytest.raises(MemoryViolation, match="something in flight"):
        executor.submit(StepPlan(1, layouts=LayoutPlan(transition=1)))
    executor.collect(None)
    with pytest.raises(MemoryViolation, match=r"sequences \[0\] on the device"):
        executor.submit(StepPlan(1, layouts=LayoutPlan(transition=1)))


def test_a_host_sequence_advances_a_layer_with_each_overlapped_plan() -> None:
    executor = _swapping_out()
    executor.collect(None)
    executor.collect(None)
    row = Row(0, 2, (102,), True, (3, 1), host=HostRow())
    results = []
    for plan in (
        StepPlan(2, begin=(_begin(0, 1, 2, 102),), rows=(row,), host=HostPlan(strategy="overlap")),
        StepPlan(3, host=HostPlan(strategy="overlap")),
        StepPlan(4, host=HostPlan(strategy="overlap")),
    ):
        executor.submit(plan)
        results += executor.collect(None)
    assert [result.host.cohorts for result in results] == [
        (CohortProgress(2, 0),),
        (CohortProgress(2, 1),),
        (),
    ]
    assert [answer.tokens for answer in results[2].answers] == [(103,)]


def test_host_sequences_that_stand_still_and_plans_for_nothing_are_noticed() -> None:
    row = Row(0, 2, (102,), True, (3, 1), host=HostRow())
    decode = Row(1, 0, (5,), True, (2,))
    for plan, problem in (
        (StepPlan(3, begin=(_begin(1, 5),), rows=(decode,)), "stand still"),
        (StepPlan(3, host=HostPlan(strategy="overlap")), "holds nothing"),
    ):
        executor = _swapping_out()
        executor.collect(None)
        executor.collect(None)
        executor.submit(
            StepPlan(
                2, begin=(_begin(0, 1, 2, 102),), rows=(row,), host=HostPlan(strategy="overlap")
            )
        )
        with pytest.raises(MemoryViolation, match=problem):
            executor.submit(plan)


def test_draft_tokens_are_accepted_as_far_as_they_are_right() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1),), rows=(Row(0, 0, (1,), True, (0,)),)))
    executor.submit(
        StepPlan(1, rows=(Row(0, 1, (101, 102, 103), True, (1,), draft=DraftRow(verify=2)),))
    )  # both draft tokens are right
    executor.submit(
        StepPlan(2, rows=(Row(0, 4, (104, 0, 106), True, (2, 3), draft=DraftRow(verify=2)),))
    )  # the first is wrong
    answers = [result.answers[0].tokens for _ in range(3) for result in executor.collect(None)]
    assert answers == [(101,), (102, 103, 104), (105,)]


def _feeding() -> MemoryCheckingExecutor:
    """Sequence 0 has its first token, which nobody has been told."""
    executor = MemoryCheckingExecutor(
        4, 2, async_scheduling=True, model=lambda prefix, begin: 100 + len(prefix)
    )
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    return executor


PLACEHOLDER = Row(0, 2, (0,), True, (1,), placeholder=True)


def test_a_fed_row_reads_the_token_that_the_plan_before_sampled() -> None:
    executor = _feeding()
    executor.submit(StepPlan(1, rows=(PLACEHOLDER,)))
    executor.collect(None)
    executor.submit(StepPlan(2, rows=(Row(0, 3, (0,), True, placeholder=True),)))
    assert [executor.collect(None)[0].answers[0].tokens for _ in range(2)] == [(103,), (104,)]


def test_a_placeholder_for_a_token_that_was_told_is_noticed() -> None:
    executor = _feeding()
    executor.collect(None)
    with pytest.raises(MemoryViolation, match="no plan in flight samples the token at 2"):
        executor.submit(StepPlan(1, rows=(PLACEHOLDER,)))


def test_a_placeholder_for_a_token_of_an_older_plan_is_noticed() -> None:
    executor = _feeding()
    executor.submit(StepPlan(1, begin=(_begin(1, 7),), rows=(Row(1, 0, (7,), True, (2,)),)))
    executor.collect(None)
    with pytest.raises(MemoryViolation, match="no plan in flight samples the token at 2"):
        executor.submit(StepPlan(2, rows=(PLACEHOLDER,)))


def test_a_placeholder_without_async_scheduling_is_noticed() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=(_begin(0, 1, 2),), rows=(Row(0, 0, (1, 2), True, (0,)),)))
    with pytest.raises(MemoryViolation, match="its row may not be a placeholder"):
        executor.submit(StepPlan(1, rows=(PLACEHOLDER,)))
