"""What each baseline decides in situations that its paper names, and what holds for all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.errors import UsageError
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.baselines import ChunkedPrefill, DecodeFirst, PrefillFirst
from nanoserve.scheduler.load import Decision, Load

IDLE = Load(
    previous=None,
    waiting_tokens=0,
    first_waiting_tokens=0,
    running_decodes=0,
    ready_decodes=0,
    ready_prefills=0,
    context_tokens=0,
    free_blocks=100,
    total_blocks=100,
    block_size=16,
    free_slots=256,
)
BUSY = replace(
    IDLE, waiting_tokens=5000, first_waiting_tokens=300, running_decodes=40, ready_decodes=40, free_blocks=50
)


def test_sarathi_fills_its_budget_with_decodes_first() -> None:
    assert ChunkedPrefill(512).decide(BUSY) == Decision(prefill_tokens=472, decodes=40)
    assert ChunkedPrefill(32).decide(BUSY) == Decision(prefill_tokens=0, decodes=32)


def test_prefill_first_stalls_decodes_while_a_prompt_fits() -> None:
    assert PrefillFirst(512).decide(BUSY) == Decision(prefill_tokens=512, decodes=0, whole_prompts=True)
    too_long = replace(BUSY, first_waiting_tokens=801)  # 51 blocks
    assert PrefillFirst(512).decide(too_long) == Decision(prefill_tokens=0, decodes=40)


def test_decode_first_takes_no_prompt_until_the_batch_has_ended() -> None:
    policy = DecodeFirst(512)
    decoding = replace(BUSY, previous=Decision(prefill_tokens=0, decodes=40))
    assert policy.decide(decoding) == Decision(prefill_tokens=0, decodes=40)
    ended = replace(decoding, running_decodes=0, ready_decodes=0)
    assert policy.decide(ended) == Decision(prefill_tokens=512, decodes=0, whole_prompts=True)
    forming = replace(BUSY, previous=Decision(prefill_tokens=512, decodes=0, whole_prompts=True))
    assert policy.decide(forming) == Decision(prefill_tokens=512, decodes=0, whole_prompts=True)


@st.composite
def _loads(draw: st.DrawFn) -> Load:
    total = draw(st.integers(1, 1000))
    running = draw(st.integers(0, 300))
    waiting = draw(st.integers(0, 10**6))
    return Load(
        previous=draw(st.sampled_from([None, Decision(0, 5), Decision(64, 0, whole_prompts=True)])),
        waiting_tokens=waiting,
        first_waiting_tokens=draw(st.integers(0, waiting)),
        running_decodes=running,
        ready_decodes=draw(st.integers(0, running)),
        ready_prefills=draw(st.integers(0, 4)),
        context_tokens=draw(st.integers(0, 10**6)),
        free_blocks=draw(st.integers(0, total)),
        total_blocks=total,
        block_size=draw(st.sampled_from([1, 16, 32])),
        free_slots=draw(st.integers(0, 256)),
    )


@pytest.mark.parametrize("name", POLICIES)
@given(load=_loads(), budget=st.integers(1, 4096))
def test_budgets_are_never_negative_and_never_above_what_there_is(name: str, load: Load, budget: int) -> None:
    policy = make_policy(name, budget)
    decision = policy.decide(load)
    assert 0 <= decision.prefill_tokens <= budget
    assert 0 <= decision.decodes <= load.ready_decodes
    assert policy.decide(load) == decision, "a policy is a pure function"


def test_unknown_policies_and_empty_budgets_are_refused() -> None:
    with pytest.raises(UsageError, match="prefill-first, decode-first, sarathi"):
        make_policy("fifo", 2048)
    with pytest.raises(UsageError, match="at least 1"):
        make_policy("sarathi", 0)
