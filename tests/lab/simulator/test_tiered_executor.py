"""Swaps, transitions and host sequences in virtual time; every timeline is worked out by hand."""

from collections.abc import Iterable

import pytest

from nanoserve.errors import UsageError
from nanoserve.lab.simulator.executor import DUMMY_TOKEN, END_TOKEN, SimulatedExecutor
from nanoserve.lab.simulator.pipeline import Passage
from nanoserve.record.times import HostTimes, ReshardTimes, SwapTimes
from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import (
    CohortProgress,
    HostPlan,
    HostResult,
    HostRow,
    LayoutPlan,
    Swap,
)
from nanoserve.scheduler.plan import Begin, Row, StepPlan, StepResult
from nanoserve.scheduler.work import Strategy
from tests.lab.simulator.tier_times import TierTimes


def _begin(*sequences: int, answer: int = 3) -> tuple[Begin, ...]:
    return tuple(Begin(sequence, (1, 1), 2, 0, answer, SamplingParams()) for sequence in sequences)


def _decode(sequence: int, keys: int = 5) -> Row:
    return Row(sequence, keys - 1, (1,), True)


def _host(sequence: int, keys: int = 5, *, sub_batch: int = 0) -> Row:
    return Row(sequence, keys - 1, (1,), True, host=HostRow(sub_batch))


def _going_on(sequence: int, keys: int = 5, *, sub_batch: int = 0) -> Row:
    return Row(sequence, keys - 1, (), True, host=HostRow(sub_batch))


def _swap(swap: int, direction: str, blocks: int) -> Swap:
    numbers = tuple(range(blocks))
    return Swap(swap, 0, direction, numbers, numbers)  # type: ignore[arg-type]


def _swaps(executor: SimulatedExecutor) -> list[tuple[str, tuple[float, float]]]:
    """When each swap so far moves."""
    return [
        (one.direction, (one.began, one.ended))
        for one in executor.take_times()
        if isinstance(one, SwapTimes)
    ]


def _attention(executor: SimulatedExecutor) -> list[HostTimes]:
    """List the CPU's computations so far."""
    return [one for one in executor.take_times() if isinstance(one, HostTimes)]


def _executor(*layouts: TierTimes) -> SimulatedExecutor:
    return SimulatedExecutor(*layouts or (TierTimes(),), block_size=2)


def _step(
    executor: SimulatedExecutor, step: int, rows: Iterable[Row] = (), strategy: Strategy = "overlap"
) -> StepResult:
    executor.submit(StepPlan(step, rows=tuple(rows), host=HostPlan(strategy=strategy)))
    (result,) = executor.collect(None)
    assert result.step == step
    return result


def _answered(result: StepResult) -> list[int]:
    return [answer.sequence for answer in result.answers]


# --------------------------------------------------------------------------------------------------
# swaps


@pytest.mark.parametrize("strategy", ["device", "overlap"])
@pytest.mark.parametrize(("swap_token", "moved"), [(0.1, Passage(3, 6)), (2.0, Passage(3, 11))])
def test_a_swap_behind_its_row_moves_with_the_step_that_computes_it(
    strategy: Strategy, swap_token: float, moved: Passage
) -> None:
    executor = _executor(TierTimes(num_layers=3, swap_token=swap_token))
    executor.submit(StepPlan(0, begin=_begin(1), rows=(_decode(1),)))  # 3 seconds
    executor.collect(None)
    prompt = Row(0, 0, (1, 1, 1, 1), True)
    swaps = (Swap(7, 0, "out", (1, 2), (3, 4), after_row=True),)
    executor.submit(
        StepPlan(1, begin=_begin(0), rows=(prompt,), host=HostPlan(swaps=swaps, strategy=strategy))
    )
    results = executor.collect(None)
    if moved.end > 6:
        assert [result.host.swapped for result in results] == [()]
        results += executor.collect(None)
    assert [(result.step, result.host.swapped) for result in results] == [(1, ()), (None, (7,))]
    assert _swaps(executor) == [("out", moved)]
    assert executor.now() == moved.end


def test_a_swap_behind_its_row_waits_for_the_pipeline_and_for_the_link() -> None:
    executor = _executor(TierTimes(num_layers=3, num_stages=3, swap_token=3.0))
    executor.submit(StepPlan(0, begin=_begin(1), rows=(_decode(1),)))  # a second in each stage
    executor.submit(
        StepPlan(
            1,
            begin=_begin(0),
            rows=(Row(0, 0, (1, 1), True),),
            host=HostPlan(swaps=(Swap(1, 0, "out", (1,), (3,), True),)),
        )
    )
    executor.submit(
        StepPlan(
            2,
            begin=_begin(2),
            rows=(Row(2, 0, (1, 1), True),),
            host=HostPlan(swaps=(Swap(2, 2, "out", (2,), (4,), True),)),
        )
    )
    assert _swaps(executor) == [("out", (1, 4)), ("out", (3, 5))]


def test_a_swap_moves_beside_the_step_and_is_answered_when_it_is_over() -> None:
    executor = _executor(TierTimes(num_layers=3))  # a step takes 3 seconds, a block of 2 tokens 2
    executor.submit(
        StepPlan(0, begin=_begin(1), rows=(_decode(1),), host=HostPlan(swaps=(_swap(7, "out", 2),)))
    )
    assert [result.step for result in executor.collect(None)] == [0]
    assert executor.now() == 3
    assert executor.collect(None) == [StepResult(None, host=HostResult(swapped=(7,)))]
    assert executor.now() == 4


def test_swaps_queue_in_their_direction_and_do_not_hinder_those_of_the_other() -> None:
    executor = _executor()
    executor.submit(
        StepPlan(
            0, host=HostPlan(swaps=(_swap(0, "out", 2), _swap(1, "out", 1), _swap(2, "in", 1)))
        )
    )
    known = {}
    for _ in range(3):
        (result,) = executor.collect(None)
        known[result.host.swapped[0]] = executor.now()
    assert known == {2: 2, 0: 4, 1: 6}
    assert _swaps(executor) == [("out", (0, 4)), ("out", (4, 6)), ("in", (0, 2))]


def test_a_plan_of_swaps_alone_takes_no_place_in_flight_and_does_not_end() -> None:
    executor = _executor()
    executor.submit(StepPlan(0, begin=_begin(1), rows=(_decode(1),)))
    executor.submit(StepPlan(1, host=HostPlan(swaps=(_swap(0, "in", 9),)), end=(1,)))
    with pytest.raises(RuntimeError, match="plan 2: 1 plans are in flight already"):
        executor.submit(StepPlan(2, rows=(_decode(1),)))
    results = [result for _ in range(2) for result in executor.collect(None)]
    assert [(result.step, result.host.swapped) for result in results] == [(0, ()), (None, (0,))]


def test_the_stages_devices_swap_at_once() -> None:
    executor = _executor(TierTimes(num_stages=3))
    executor.submit(StepPlan(0, host=HostPlan(swaps=(_swap(0, "out", 3),))))
    executor.collect(None)
    assert executor.now() == 2


def test_a_sequence_that_begins_again_on_the_host_still_answers_as_many_tokens_as_its_seed_says() -> (
    None
):
    executor = _executor()
    executor.submit(StepPlan(0, begin=_begin(1, answer=3), rows=(Row(1, 0, (1, 1), True),)))
    executor.collect(None)
    again = Begin(1, (1, 1, 1), 2, 0, 3, SamplingParams())
    executor.submit(
        StepPlan(
            1,
            end=(1,),
            begin=(again,),
            rows=(_host(1, keys=3),),
            host=HostPlan(strategy="asymmetric"),
        )
    )
    first = executor.collect(None)[0].answers[0]
    second = _step(executor, 2, [_host(1, keys=4)], "asymmetric").answers[0]
    assert (first.tokens, second.tokens) == ((DUMMY_TOKEN,), (END_TOKEN,))


# -------------------------------------------------------------------------------------------------
# transitions


def test_a_transition_waits_for_what_is_under_way_and_reloads_over_the_link() -> None:
    executor = _executor(TierTimes(num_stages=3), TierTimes(reload=7.0))
    assert executor.max_in_flight == 3
    # through 3 stages of 1 second
    executor.submit(StepPlan(0, begin=_begin(1), rows=(_decode(1),)))
    # 12 tokens over three stages: 4 seconds
    executor.submit(StepPlan(1, host=HostPlan(swaps=(_swap(0, "out", 6),))))
    executor.submit(StepPlan(2, layouts=LayoutPlan(transition=1)))
    executor.submit(StepPlan(3, rows=(_decode(1),), layouts=LayoutPlan(current=1)))
    times = {}
    for _ in range(4):
        (result,) = executor.collect(None)
        times[result.step] = executor.now()
    assert times == {0: 3, None: 4, 2: 11, 3: 14}
    (reload,) = [one for one in executor.take_times() if isinstance(one, ReshardTimes)]
    assert (reload.layout, reload.began, reload.ended) == (1, 4, 11)
    assert [pipeline.busy_seconds for pipeline in executor.pipelines] == [[1, 1, 1], [3]]


def test_a_plan_for_another_layout_than_the_current_is_refused() -> None:
    executor = _executor(TierTimes(), TierTimes())
    with pytest.raises(RuntimeError, match="plan 0 is for layout 1, but 0 is current"):
        executor.submit(
            StepPlan(0, begin=_begin(1), rows=(_decode(1),), layouts=LayoutPlan(current=1))
        )


def test_the_layout_does_not_change_under_a_host_sequence() -> None:
    executor = _executor(TierTimes(), TierTimes())
    executor.submit(
        StepPlan(0, begin=_begin(1), rows=(_host(1),), host=HostPlan(strategy="overlap"))
    )
    executor.collect(None)
    with pytest.raises(RuntimeError, match="plan 1 changes the layout while"):
        executor.submit(StepPlan(1, layouts=LayoutPlan(transition=1)))


# ------------------------------------------------------------------------------------------
# asynchronous overlap


def _started(times: TierTimes, host: int = 1) -> SimulatedExecutor:
    """One sequence decodes on the device, number 0; host sequences 1, 2, ... have been begun."""
    executor = _executor(times)
    executor.submit(StepPlan(99, begin=_begin(*range(host + 1), answer=100), rows=(_decode(0),)))
    executor.collect(None)
    return executor


def test_a_host_token_takes_one_step_more_than_there_are_layers() -> None:
    executor = _started(TierTimes(num_layers=3, host_key=0.1))
    results = [
        _step(executor, step, [_decode(0), *([_host(1)] if step == 0 else [])]) for step in range(4)
    ]
    assert [_answered(result) for result in results] == [[0], [0], [0], [0, 1]]
    assert [result.host.cohorts for result in results] == [
        (CohortProgress(0, 0),),
        (CohortProgress(0, 1),),
        (CohortProgress(0, 2),),
        (),
    ]


def test_those_who_join_prolong_half_a_layer_at_each_of_their_two_places() -> None:
    times = TierTimes(num_layers=3, layer=1.0, token=0.5, ends=0.25, sample=0.125, host_key=0.1)
    executor = _started(times, host=2)
    seconds = [
        _step(executor, step, [_decode(0), *([_host(1), _host(2)] if step == 0 else [])]).seconds
        for step in range(4)
    ]
    alone = 3 * 1.5 + 0.25 + 0.125
    half = 2 * 0.5 / 2
    assert seconds == pytest.approx(
        [alone + half, alone + 2 * half, alone + 2 * half, alone + half + 2 * 0.125]
    )


def test_a_processor_that_is_late_lets_the_cohort_miss_a_step_and_no_one_waits() -> None:
    # A step of 3 layers takes 3 seconds. The CPU gets layer 0 at 3.5 and is done at 8.5, 5 keys
    # later; the next steps come to the second half of layer 0 at 6.5 and 9.5.
    executor = _started(TierTimes(num_layers=3, host_key=1.0))
    results = [
        _step(executor, step, [_decode(0), *([_host(1)] if step == 0 else [])]) for step in range(4)
    ]
    assert [result.host.cohorts[0].layers for result in results] == [0, 0, 1, 1]
    assert [result.seconds for result in results] == [3, 3, 3, 3]
    assert executor.now() == 15


def test_a_processor_serves_one_cohort_at_a_time() -> None:
    # 2.5 seconds for a cohort's layer; a step takes 3. The first cohort's layer 0 is computed from
    # 3.5 to 6, in time for 6.5; the second's from 6.5 to 9, in time for 9.5. The first's layer 1
    # arrives at 7.5, waits for the CPU until 9 and is done at 11.5, too late for 10.5. So it is
    # passed at 13.5; there the second's, done at 14, is too late.
    executor = _started(TierTimes(num_layers=3, host_key=0.5), host=2)
    begins = {0: [_host(1)], 1: [_host(2)]}
    results = [_step(executor, step, [_decode(0), *begins.get(step, [])]) for step in range(4)]
    layers = [{cohort.step: cohort.layers for cohort in result.host.cohorts} for result in results]
    assert layers == [{0: 0}, {0: 1, 1: 0}, {0: 1, 1: 1}, {0: 2, 1: 1}]
    attention = _attention(executor)
    assert [one.began for one in attention] == [3.5, 6.5, 9, 11.5, 14.5]
    assert all(one.seconds == 2.5 and one.sequences == 1 for one in attention)


def test_steps_of_the_device_alone_carry_nobody_on() -> None:
    executor = _started(TierTimes(host_key=0.1))
    _step(executor, 0, [_decode(0), _host(1)])
    assert _step(executor, 1, [_decode(0)], "device").host.cohorts == ()
    assert _step(executor, 2, [_decode(0)]).host.cohorts == (CohortProgress(0, 1),)


def test_a_step_without_rows_waits_for_the_processor_and_computes_what_its_cohorts_pass() -> None:
    executor = _started(TierTimes(num_layers=2, layer=1.0, host_key=1.0))
    _step(executor, 0, [_host(1, keys=4)])  # from 2: half a layer; the CPU has it from 2.5 to 6.5
    assert executor.now() == 2.5
    _step(executor, 1)  # from 6.5: two halves; the CPU has layer 1 from 7.5 to 11.5
    assert executor.now() == 7.5
    result = _step(executor, 2)
    assert executor.now() == 12
    assert (_answered(result), result.host.cohorts, result.seconds) == ([1], (), 0.5)


def test_host_sequences_want_one_stage() -> None:
    executor = _executor(TierTimes(num_stages=3))
    with pytest.raises(UsageError, match="simulated for one pipeline stage, not for 3; use --pp 1"):
        executor.submit(
            StepPlan(0, begin=_begin(1), rows=(_host(1),), host=HostPlan(strategy="overlap"))
        )


# -----------------------------------------------------------------------------------------
# asymmetric pipelining


def test_an_asymmetric_step_by_hand() -> None:
    # Per layer: linear 1 + 0.1 a token, device attention 0.1 a key, CPU 0.2 a key and 0.5 a
    # sequence.
    times = TierTimes(
        num_layers=3,
        layer=1.0,
        token=0.1,
        key=0.1,
        host_key=0.2,
        host_row=0.5,
        ends=0.3,
        sample=0.01,
    )
    executor = _started(times, host=3)
    rows = [
        _decode(0, keys=8),
        _host(1, keys=10),
        _host(2, keys=20, sub_batch=1),
        _host(3, keys=30, sub_batch=1),
    ]
    # sub-batch 0 on the device, 1 on the CPU
    first_half = max(1 + 2 * 0.1 + 8 * 0.1, 50 * 0.2 + 2 * 0.5)
    second_half = max(1 + 2 * 0.1, 10 * 0.2 + 0.5)
    result = _step(executor, 0, rows, "asymmetric")
    # one head
    assert result.seconds == pytest.approx(3 * (first_half + second_half) + 0.3 + 4 * 0.01)
    assert _answered(result) == [0, 1, 2, 3]
    assert executor.host_tokens == 3
    (told,) = _attention(executor)
    assert (told.ended, told.seconds, told.sequences) == (
        executor.now(),
        pytest.approx(3 * (11 + 2.5)),
        3,
    )


@pytest.mark.parametrize("strategy", ["asymmetric", "overlap"])
def test_without_host_rows_every_strategy_takes_the_same_time(strategy: Strategy) -> None:
    executor = _started(TierTimes(token=0.1, key=0.1, ends=0.3))
    alone = _step(executor, 0, [_decode(0)], "device")
    assert _step(executor, 1, [_decode(0)], strategy).seconds == pytest.approx(alone.seconds)


def test_part_way_sequences_take_part_in_the_layers_that_are_left_and_leave_their_cohort() -> None:
    # A step of the device alone takes 4 layers of 1 second; a layer of sub-batch 1 takes 1 too, and
    # the CPU 2 in it.
    executor = _started(TierTimes(num_layers=4, host_key=0.4), host=3)
    # the CPU needs 4 for both: from 4.5 to 8.5
    _step(executor, 0, [_decode(0), _host(1), _host(2)])
    # comes to layer 0 at 8.5, to layer 1's first half at 9.5: the CPU ends at 13.5
    _step(executor, 1, [_decode(0)])
    result = _step(executor, 2, [_decode(0), _going_on(2, sub_batch=1)], "asymmetric")
    # From 12: the CPU is late by 1.5 s, so layer 0 takes 1.5; layer 1: one and one; layers 2 and 3:
    # two and one.
    assert result.seconds == pytest.approx(1.5 + 2 + 2 * 3)
    assert _answered(result) == [0, 2]
    assert result.host.cohorts == (CohortProgress(0, 1),)
    assert _step(executor, 3, [_decode(0)]).host.cohorts == (CohortProgress(0, 2),)
    last = _step(executor, 4, [_going_on(1)], "asymmetric")
    assert (_answered(last), last.host.cohorts) == ([1], ())


def test_who_has_no_token_under_way_cannot_go_on() -> None:
    executor = _started(TierTimes())
    with pytest.raises(RuntimeError, match="sequence 1 has no token under way"):
        _step(executor, 0, [_going_on(1)], "asymmetric")
