"""Seesaw's phases: when the layout changes, what a step of each holds, and what its figure 2
compares it with."""

from dataclasses import replace

import pytest

from nanoserve.lab.benchmarks.policies.variants import DecodePrioritizing, PrefillPrioritizing
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.loads import IDLE
from tests.scheduler.tiered import Bench

SEESAW = TransitionMinimizing(512)
PREFILL, DECODE = 0, 1

EMPTY = replace(
    IDLE,
    layouts=replace(IDLE.layouts, count=2),
    host=replace(IDLE.host, total_blocks=400, free_blocks=400),
)
# ten blocks each, the first answer included
BACKLOG = replace(EMPTY, waiting_tokens=50_000, first_waiting_tokens=159)


def pooled(load: Load, sequences: int, *, ready: int | None = None) -> Load:
    """With so many sequences of ten blocks in the pool."""
    return replace(
        load,
        host=replace(
            load.host,
            decodes=sequences,
            ready=sequences if ready is None else ready,
            context_tokens=160 * sequences,
            free_blocks=400 - 10 * sequences,
        ),
    )


def decoding(load: Load, sequences: int) -> Load:
    """In the decode layout, with so many sequences of ten blocks on the device."""
    return replace(
        load,
        layouts=replace(load.layouts, current=DECODE),
        running_decodes=sequences,
        ready_decodes=sequences,
        context_tokens=160 * sequences,
        free_blocks=100 - 10 * sequences,
    )


def test_prompts_are_computed_and_parked_until_the_pool_is_full() -> None:
    expected = Decision(512, 0, host=HostDecision(park=True, preempt=True), layout=PREFILL)
    assert SEESAW.decide(BACKLOG) == expected
    # far more than the 10 that the device holds
    assert SEESAW.decide(pooled(BACKLOG, 39)) == expected
    assert SEESAW.decide(pooled(BACKLOG, 40)) == Decision(0, 0, layout=DECODE)
    # and its first answer needs an eleventh
    ten_blocks = replace(BACKLOG, first_waiting_tokens=160)
    assert SEESAW.decide(pooled(ten_blocks, 38)) == expected
    assert SEESAW.decide(pooled(ten_blocks, 39)) == Decision(0, 0, layout=DECODE)


@pytest.mark.parametrize(
    ("waiting", "pool", "depth", "budget", "tokens"),
    [  # t = 100 + 1 a token. Time is (k + P - 1) t(tokens / k)
        (1200, 400, 4, 2048, 200),  # k = 5: 8 * 340, 6: 9 * 300, 7: 10 * 272
        (1200, 400, 4, 150, 150),  # eight steps at the least: 11 * 250, nine: 12 * 234
        # 60 blocks hold 960 tokens. k = 4: 7 * 340, 5: 8 * 292, 6: 9 * 260
        (1200, 60, 4, 2048, 192),
        (1000, 400, 2, 2048, 334),  # k = 2: 3 * 600, 3: 4 * 434, 4: 5 * 350
        (50, 400, 4, 2048, 50),
        (1200, 400, 1, 2048, 2048),  # one stage is always full
    ],
)
def test_prompts_are_computed_in_the_steps_that_are_through_a_pipeline_soonest(
    waiting: int, pool: int, depth: int, budget: int, tokens: int
) -> None:
    load = replace(
        BACKLOG,
        waiting_tokens=waiting,
        first_waiting_tokens=50,
        host=replace(BACKLOG.host, free_blocks=pool),
    )
    load = replace(load, pipeline_depth=depth)
    policy, predictor = (
        TransitionMinimizing(budget),
        LinearPredictor(num_layers=1, linear=100.0, row=1.0),
    )
    assert policy.decide(replace(load, predictor=predictor)).prefill_tokens == tokens
    assert policy.decide(load).prefill_tokens == budget


def test_prompts_that_have_begun_are_ended_before_the_turn() -> None:
    full = pooled(BACKLOG, 40)
    # what is left of it
    assert SEESAW.decide(replace(full, ready_prefills=1)).prefill_tokens == 159
    # its answer may be the first half of a prompt
    in_flight = SEESAW.decide(replace(full, steps_in_flight=1))
    assert (in_flight.prefill_tokens, in_flight.layout) == (0, PREFILL)


def test_decoding_begins_too_when_nothing_is_left_to_prefill() -> None:
    assert SEESAW.decide(pooled(EMPTY, 3)).layout == DECODE
    last_on_its_way = replace(EMPTY, host=replace(EMPTY.host, moving=1))
    assert SEESAW.decide(last_on_its_way).layout == DECODE
    assert SEESAW.decide(EMPTY).layout == PREFILL  # nothing to decode either


def test_prompts_that_wait_for_slots_are_computed_before_the_turn() -> None:
    """All slots are held by sequences that move to the pool, which has room for more."""
    moving = replace(pooled(BACKLOG, 0), free_slots=0, first_waiting_tokens=0)
    moving = replace(moving, host=replace(moving.host, moving=256))
    assert SEESAW.decide(moving).layout == PREFILL
    assert SEESAW.decide(replace(moving, waiting_tokens=0)).layout == DECODE


def test_few_slots_do_not_bring_many_transitions() -> None:
    bench = Bench(num_blocks=32, host_blocks=64, other=32, swap_delay=2, max_num_seqs=2)
    bench.scheduler.policy = TransitionMinimizing(8)
    for name in "abcdefghijklmnop":
        bench.add(name, 4, 6)
    bench.finish()
    assert bench.scheduler.extensions.layouts.transitions == 1


def test_decoding_takes_in_what_fits_and_shares_the_decodes_among_the_stages() -> None:
    load = replace(pooled(decoding(BACKLOG, 6), 30), pipeline_depth=4, expected_growth=15)
    # four times ten blocks are free, fifteen of them spoken for: two; and a step of six decodes is
    # two of them
    assert SEESAW.decide(load) == Decision(
        0, 2, host=HostDecision(swap_in=2, preempt=True), layout=DECODE
    )
    assert SEESAW.decide(replace(load, ready_decodes=1)).decodes == 1
    assert SEESAW.decide(replace(load, host=replace(load.host, ready=1))).host.swap_in == 1
    idle = replace(pooled(decoding(BACKLOG, 0), 30), expected_growth=99)
    assert SEESAW.decide(idle).host.swap_in == 1  # nobody there who could grow


def test_prefill_comes_back_when_the_pool_and_the_device_are_empty_and_something_waits() -> None:
    done = decoding(BACKLOG, 0)
    assert SEESAW.decide(done).layout == PREFILL
    assert SEESAW.decide(pooled(done, 1)).layout == DECODE
    assert SEESAW.decide(replace(done, host=replace(done.host, moving=1))).layout == DECODE
    # nothing waits: no transition for its own sake
    assert SEESAW.decide(decoding(EMPTY, 0)).layout == DECODE


# b = 5 decodes of 160 tokens, B = 10, four layers of 1 s and 0.001 s per key: T(5) = 4 * 1.8 = 7.2,
# T(10) = 10.4, so a step wastes 7.2 - 10.4 / 2 = 2.0 s. Sending 800 tokens back takes 2 * (0.1 *
# 800 + 20) = 200 s.
@pytest.mark.parametrize(
    ("remaining", "layout"), [(0, DECODE), (99, DECODE), (100, DECODE), (101, PREFILL)]
)
def test_a_tail_is_finished_or_sent_back_whichever_costs_less(remaining: int, layout: int) -> None:
    predictor = LinearPredictor(swap_token=0.1, transition=20.0)
    load = replace(decoding(BACKLOG, 5), predictor=predictor, longest_remaining=remaining)
    assert SEESAW.decide(load).layout == layout


def test_who_decodes_on_when_turning_back_would_gain_nothing() -> None:
    load = replace(
        decoding(BACKLOG, 5), predictor=LinearPredictor(swap_token=0.1), longest_remaining=1000
    )
    assert SEESAW.decide(load).layout == PREFILL
    assert SEESAW.decide(replace(load, predictor=None)).layout == DECODE
    full = replace(decoding(load, 10), longest_remaining=1000)
    assert SEESAW.decide(full).layout == DECODE  # B = b
    # B = 5.1: 2 % of a step are wasted
    lone = replace(load, waiting_tokens=16, first_waiting_tokens=16)
    assert SEESAW.decide(lone).layout == DECODE
    # 50 blocks on the device and 10 for the prompt
    small_pool = replace(load, host=replace(load.host, total_blocks=59, free_blocks=59))
    assert SEESAW.decide(small_pool).layout == DECODE


def test_a_pool_smaller_than_the_device_brings_fewer_back() -> None:
    # The pool of 60 blocks holds B = 6: T(6) = 4 * 1.96 = 7.84, so a step wastes 7.2 - 7.84 / 1.2 =
    # 0.67 s, not 2.0.
    predictor = LinearPredictor(swap_token=0.1, transition=20.0)
    load = replace(decoding(BACKLOG, 5), predictor=predictor)
    load = replace(load, host=replace(load.host, total_blocks=60, free_blocks=60))
    layouts = [SEESAW.decide(replace(load, longest_remaining=steps)).layout for steps in (299, 301)]
    assert layouts == [DECODE, PREFILL]


def test_a_transition_under_way_is_carried_through() -> None:
    turning = replace(pooled(decoding(BACKLOG, 3), 2), previous=Decision(0, 0, layout=PREFILL))
    turning = replace(turning, host=replace(turning.host, moving=2))
    assert SEESAW.decide(turning) == Decision(0, 0, layout=PREFILL)
    assert SEESAW.decide(replace(turning, previous=Decision(0, 3, layout=DECODE))).layout == DECODE


def test_what_the_pool_could_never_hold_is_decoded_where_it_was_computed() -> None:
    huge = replace(
        BACKLOG,
        first_waiting_tokens=900,
        host=replace(BACKLOG.host, total_blocks=50, free_blocks=50),
    )
    assert SEESAW.decide(huge) == Decision(
        512, 0, host=HostDecision(park=False, preempt=True), layout=PREFILL
    )
    computed = replace(
        huge, waiting_tokens=0, first_waiting_tokens=0, running_decodes=1, ready_decodes=1
    )
    assert SEESAW.decide(computed) == Decision(
        0, 1, host=HostDecision(swap_out=1, park=True, preempt=True), layout=PREFILL
    )


def test_one_layout_or_no_pool_is_prefill_first() -> None:
    for alone in ({"layouts": IDLE.layouts}, {"host": IDLE.host}):
        load = replace(BACKLOG, running_decodes=4, ready_decodes=4, **alone)
        assert SEESAW.decide(load) == Decision(512, 0, whole_prompts=True)
        full = replace(load, free_blocks=9)
        assert SEESAW.decide(full) == Decision(0, 4, whole_prompts=True)


@pytest.mark.parametrize("policy", [PrefillPrioritizing(512), DecodePrioritizing(512)])
def test_without_a_tiered_buffer_no_more_is_prefilled_than_the_device_will_hold(
    policy: Policy,
) -> None:
    assert policy.decide(pooled(BACKLOG, 8)).layout == PREFILL  # 8 * (10 + 1) + 10 blocks of 100
    assert policy.decide(pooled(BACKLOG, 9)).layout == DECODE
    assert SEESAW.decide(pooled(BACKLOG, 9)).layout == PREFILL


def test_prefill_prioritizing_turns_for_one_prompt_and_decode_prioritizing_for_the_last_token() -> (
    None
):
    some_room, no_room = decoding(BACKLOG, 8), decoding(BACKLOG, 9)
    prefill_first, decode_first = PrefillPrioritizing(512), DecodePrioritizing(512)
    assert prefill_first.decide(some_room).layout == PREFILL
    # ten are free, but nine may each need one
    assert prefill_first.decide(no_room).layout == DECODE
    # first what is computed already
    assert prefill_first.decide(pooled(some_room, 1)).layout == DECODE
    assert decode_first.decide(some_room).layout == DECODE
    assert decode_first.decide(decoding(BACKLOG, 1)).layout == DECODE
    assert decode_first.decide(decoding(BACKLOG, 0)).layout == PREFILL
