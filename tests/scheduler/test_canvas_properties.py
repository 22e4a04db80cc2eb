"""Random lives of models that write canvases, on few blocks: chunks, preemption, the prefix cache,
several samples, aborts, several plans in flight and deaths of workers, under every policy."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.request import FinishReason, Request
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.windows import longest_sequence
from tests.scheduler.canvases import (
    CanvasBench,
    expected_free_tokens,
    expected_tokens,
    plain,
)
from tests.scheduler.lives import WINDOWS, Arrival, live, lives
from tests.scheduler.test_losses import DEATHS

LENGTHS = st.sampled_from([1, 2, 3, 4, 8])
ALONE = [name for name, entry in POLICIES.items() if not entry.attends_on_host]


@pytest.mark.parametrize("policy", ALONE)
@settings(max_examples=25, deadline=None)
@given(life=lives(), length=LENGTHS, deaths=st.one_of(st.just(frozenset[int]()), DEATHS))
def test_every_request_gets_the_tokens_it_would_get_alone(
    policy: str, life: dict, length: int, deaths: frozenset[int]
) -> None:
    slots = life["num_blocks"] * life["block_size"]
    longest = min(life["max_model_len"], slots) // length * length
    arrivals = [
        replace(one, request=plain(one.request))
        for one in life["arrivals"]
        if len(one.request.prompt) < longest
    ]
    if not arrivals:
        return
    budget = max(life["token_budget"], 4 * length)
    bench = CanvasBench(
        policy=make_policy(policy, budget),
        length=length,
        budget=budget,
        num_blocks=life["num_blocks"],
        block_size=life["block_size"],
        max_model_len=longest,
        deaths=deaths,
        depth=life["depth"],
        prefix_caching=life["prefix_caching"],
        max_num_seqs=life["max_num_seqs"],
    )
    outputs, reasons = live(bench.engine, arrivals)
    check_answers(arrivals, longest, length, outputs, reasons, bench.executor.losses)
    assert bench.scheduler.pool.free_blocks == life["num_blocks"]
    assert not bench.canvases._unsettled
    for plan in bench.executor.plans:
        tokens = sum(len(row.tokens) for row in plan.rows)
        assert tokens <= budget or len(plan.rows) == 1, plan


@pytest.mark.parametrize("policy", ALONE)
@settings(max_examples=25, deadline=None)
@given(life=lives(WINDOWS), length=LENGTHS, deaths=st.one_of(st.just(frozenset[int]()), DEATHS))
def test_free_canvases_get_the_tokens_they_would_get_alone(
    policy: str, life: dict, length: int, deaths: frozenset[int]
) -> None:
    """With sliding windows and without."""
    windows, num_blocks, block_size = life["windows"], life["num_blocks"], life["block_size"]
    longest = longest_sequence(windows, num_blocks, block_size, length, 100)
    longest = min(longest, life["max_model_len"])
    arrivals = [
        replace(one, request=plain(one.request))
        for one in life["arrivals"]
        if len(one.request.prompt) < longest
    ]
    if not arrivals:
        return
    budget = max(life["token_budget"], length)
    bench = CanvasBench(
        policy=make_policy(policy, budget),
        length=length,
        budget=budget,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=longest,
        deaths=deaths,
        depth=life["depth"],
        prefix_caching=life["prefix_caching"],
        max_num_seqs=life["max_num_seqs"],
        is_free=True,
        windows=windows,
    )
    outputs, reasons = live(bench.engine, arrivals)
    check_answers(
        arrivals, longest, length, outputs, reasons, bench.executor.losses, expected_free_tokens
    )
    assert bench.scheduler.pool.free_blocks == num_blocks
    assert not bench.canvases._unsettled
    for plan in bench.executor.plans:
        tokens = sum(len(row.tokens) for row in plan.rows)
        assert tokens <= budget or len(plan.rows) == 1, plan


def check_answers(
    arrivals: list[Arrival],
    max_model_len: int,
    length: int,
    outputs: dict,
    reasons: dict,
    deaths: int,
    alone: Callable[[Request, int, int, int], tuple[list[int], str]] = expected_tokens,
) -> None:
    failed = {name for (name, _), reason in reasons.items() if reason is FinishReason.ERROR}
    assert len(failed) <= max(0, deaths - 2)
    for arrival in arrivals:
        for index in range(arrival.request.params.n):
            key = (arrival.request.request_id, index)
            expected, reason = alone(arrival.request, index, length, max_model_len)
            if reasons[key] in (FinishReason.ABORT, FinishReason.ERROR):
                assert outputs[key] == expected[: len(outputs[key])]
            else:
                assert (outputs[key], reasons[key].value) == (expected, reason)
