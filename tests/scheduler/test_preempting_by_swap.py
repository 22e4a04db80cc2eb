"""Preemption by swap: what is cheaper is done, what has moved comes back first, and nothing
starves."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.policies.placement import PreemptingBySwap
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.lives import lives
from tests.scheduler.loads import IDLE
from tests.scheduler.tier_lives import SECONDS, TIERS, Times, check
from tests.scheduler.tiered import Bench

ORDINARY = [name for name, entry in POLICIES.items() if not entry.attends_on_host]
FULL = replace(
    IDLE,
    running_decodes=4,
    ready_decodes=4,
    context_tokens=400,
    free_blocks=0,
    host=replace(IDLE.host, total_blocks=50),
)
"""Four decodes of 100 tokens each, and no block for any of them to grow into."""


def swapping(name: str, budget: int) -> PreemptingBySwap:
    policy = make_policy(name, budget, swaps=True)
    assert isinstance(policy, PreemptingBySwap)
    return policy


def test_who_attends_on_the_host_is_left_alone() -> None:
    assert ORDINARY == [
        "prefill-first",
        "decode-first",
        "sarathi",
        "throttling",
        "adaptive",
        "seesaw",
    ]
    for name in set(POLICIES) - set(ORDINARY):
        assert make_policy(name, 64, swaps=True) == make_policy(name, 64)


@pytest.mark.parametrize(
    ("swap_token", "way"),
    # 2 x 100 tokens; 4 layers x (2 + 100 x (0.03 + 0.0475)) + 1
    [(0.19, "moves"), (0.21, "is computed again")],
)
def test_it_moves_where_that_is_cheaper_than_one_step_that_computes_it_again(
    swap_token: float, way: str
) -> None:
    predictor = LinearPredictor(
        linear=2.0, row=0.03, prompt_token=0.0475, overhead=1.0, swap_token=swap_token
    )
    decision = swapping("sarathi", 64).decide(replace(FULL, predictor=predictor))
    assert decision.host.preempt is (way == "moves")


def test_without_a_predictor_everything_is_computed_again() -> None:
    assert not swapping("sarathi", 64).decide(FULL).host.preempt


def test_while_there_is_room_nobody_asks() -> None:
    @dataclass(frozen=True)
    class NotToBeAsked(LinearPredictor):
        def swap_seconds(self, context_tokens: int) -> float:
            raise AssertionError

    load = replace(FULL, free_blocks=5, predictor=NotToBeAsked())
    assert not swapping("sarathi", 64).decide(load).host.preempt


def test_no_new_prompt_while_sequences_are_on_the_host_or_on_their_way() -> None:
    waiting = replace(FULL, free_blocks=50, waiting_tokens=90, first_waiting_tokens=30)
    policy = swapping("sarathi", 64)
    assert policy.decide(waiting).prefill_tokens == 60
    for away in (
        replace(waiting, host=replace(waiting.host, decodes=1, ready=1, context_tokens=80)),
        replace(waiting, host=replace(waiting.host, moving=1)),
    ):
        assert policy.decide(away) == Decision(0, 4, host=HostDecision(swap_in=away.host.ready))
        partly = policy.decide(replace(away, ready_prefills=1))
        assert partly.prefill_tokens == 30, "the one that is partly computed goes on"


def test_a_policy_that_would_stop_for_a_prompt_decodes_instead() -> None:
    load = replace(
        FULL,
        free_blocks=50,
        waiting_tokens=90,
        first_waiting_tokens=30,
        host=replace(FULL.host, moving=1),
    )
    assert swapping("prefill-first", 64).decide(load) == Decision(0, 4, whole_prompts=False)


def test_as_many_come_back_as_fit_beside_the_growth_expected() -> None:
    load = replace(
        FULL,
        free_blocks=20,
        host=replace(FULL.host, decodes=3, ready=3, context_tokens=3 * 80),
        expected_growth=9,
    )
    assert swapping("throttling", 64).decide(load).host.swap_in == 2, (
        "five blocks each, eleven to be had"
    )


@pytest.mark.parametrize(
    ("swap_token", "swaps", "begun"),
    [(0.001, ["1 out", "1 in"], [0, 1, 1, 2]), (9.0, [], [0, 1, 1, 2, 2])],
)
def test_what_gave_way_comes_back_before_a_new_prompt_begins(
    swap_token: float, swaps: list[str], begun: list[int]
) -> None:
    """Two grow until the device is full, and a third waits all the while."""
    bench = Bench(
        num_blocks=8, host_blocks=8, predictors=[LinearPredictor(swap_token=swap_token)] * 2
    )
    bench.scheduler.policy = swapping("sarathi", 64)
    bench.add("a", 6, 9)
    bench.add("b", 6, 6)
    bench.step()
    bench.add("c", 6, 2)
    bench.finish()
    assert bench.swapped() == swaps
    assert (bench.scheduler.table.preemptions == 0) is bool(swaps)
    assert [begin.sequence for plan in bench.plans for begin in plan.begin] == begun, (
        "the second one twice in any case"
    )


# --------------------------------------------------------------------------------------------------
# random lives


@st.composite
def _memory(draw: st.DrawFn) -> dict:
    """Settings as ever, but with a predictor more often than not: it is what the swaps hang on."""
    memory = draw(TIERS)
    cheap = Times(linear=1.0, attention=1.0, host_attention=1.0, moving=draw(SECONDS))
    return memory | {"times": draw(st.sampled_from([memory["times"], cheap])), "other_layouts": []}


@pytest.mark.parametrize("name", ORDINARY)
@settings(max_examples=15, deadline=None)
@given(life=lives(), memory=_memory())
def test_every_request_gets_the_tokens_it_would_get_alone(
    name: str, life: dict, memory: dict
) -> None:
    check(swapping(name, life["token_budget"]), life, memory)


@settings(max_examples=15, deadline=None)
@given(life=lives(), memory=_memory(), deaths=st.sets(st.integers(1, 60), max_size=3))
def test_with_workers_that_die(life: dict, memory: dict, deaths: set[int]) -> None:
    check(swapping("sarathi", life["token_budget"]), life, memory, deaths)
