"""The words that pass between scheduler and executors."""

import msgspec

from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import (
    NO_STATE,
    CanvasRow,
    CohortProgress,
    HostPlan,
    HostResult,
    HostWork,
    StatePlan,
    StateRow,
    Swap,
)
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan, StepResult


def test_a_plan_crosses_to_another_process_as_typed_msgpack() -> None:
    begin = Begin(3, (1, 2), 2, 0, 5, SamplingParams(logit_bias={1: 2.0}, stop=("x",)), (0,))
    rows = (Row(3, 0, (1, 2), True, (4,)), Row(5, 7, (0,), True, placeholder=True))
    plan = StepPlan(7, begin=(begin,), rows=rows, copies=(Copy(1, 2),), end=(9,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_a_row_names_a_block_of_every_cache_group_and_costs_nothing_more_with_one() -> None:
    # of the first group, all before lies behind its window
    grouped = Row(3, 32, (1,), True, (-1, 4, 7))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grouped), type=Row) == grouped
    single = msgspec.msgpack.encode(Row(3, 32, (1,), True, (4,)))
    assert len(msgspec.msgpack.encode(grouped)) == len(single) + 2, "a byte for each more block"


def test_a_plain_row_has_a_byte_for_each_mechanism() -> None:
    """By the specification of msgpack: an array of 9, small integers, true, an empty array, false,
    and nil three times."""
    encoded = bytes([0x99, 3, 7, 0x91, 5, 0xC3, 0x90, 0xC2, 0xC0, 0xC0, 0xC0])
    assert msgspec.msgpack.encode(Row(3, 7, (5,), True)) == encoded


def test_a_row_ends_with_a_canvas_and_its_answer_is_the_canvas_or_its_tokens() -> None:
    row = Row(3, 8, (5, 99, 99, 99), True, (4,), canvas=CanvasRow(length=4, fixed=1, step=0))
    answers = Answer(3, canvas=(5, 7, 99, 99)), Answer(3, (7, 8, 9))
    result = StepResult(6, answers)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=Row) == row
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result


def test_a_swap_says_whether_it_follows_its_row() -> None:
    out = Swap(swap=1, sequence=3, direction="out", device_blocks=(4,), host_blocks=(0,))
    parked = Swap(
        swap=2,
        sequence=5,
        direction="out",
        device_blocks=(6, 7),
        host_blocks=(1, 2),
        after_row=True,
    )
    plan = StepPlan(8, rows=(Row(5, 0, (1, 2), True, (6, 7)),), host=HostPlan(swaps=(out, parked)))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
    assert decoded == plan
    assert [swap.after_row for swap in decoded.host.swaps] == [False, True]


def test_a_result_carries_what_the_cpu_took_and_that_its_attention_was_lost() -> None:
    result = StepResult(
        4,
        (Answer(1, (9,)),),
        host=HostResult(
            cohorts=(CohortProgress(3, 1),),
            work=(HostWork(8, 4096, 0.002), HostWork(1, 16, 0.0001)),
            lost="the thread that attends on the CPU was killed",
        ),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
    assert msgspec.json.decode(msgspec.json.encode(result), type=StepResult) == result


def test_a_result_that_says_nothing_of_the_host_says_so() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(StepResult(0)), type=StepResult)
    assert (plain.host.work, plain.host.lost) == ((), None)


def test_a_plan_says_where_its_rows_find_and_leave_recurrent_states() -> None:
    placed = (StateRow(3, NO_STATE, 5), StateRow(4, 2, 7, ((64, 1), (128, 2))))
    rows = (Row(3, 0, (1, 2), True, (4,)), Row(4, 0, tuple(range(130)), False, (6,)))
    plan = StepPlan(9, rows=rows, state=StatePlan(placed))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_a_plan_recorded_before_there_were_recurrent_states_can_be_read() -> None:
    plan = StepPlan(9, rows=(Row(3, 0, (1, 2), True, (4,)),))
    words = msgspec.msgpack.decode(msgspec.msgpack.encode(plan))
    assert words.pop() == [[]], "the states are its last word"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(words), type=StepPlan) == plan
