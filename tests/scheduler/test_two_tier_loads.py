"""Policies as pure functions of loads with two tiers and two layouts: nothing is asked for that is
not there."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.lab.benchmarks.policies.variants import DecodePrioritizing, PrefillPrioritizing
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import Cohort, HostLoad, LayoutsLoad
from tests.fakes.linear_predictor import LinearPredictor

RESHARDING = {
    "prefill-prioritizing": PrefillPrioritizing,
    "decode-prioritizing": DecodePrioritizing,
}
"""Policies of Seesaw's figure 2, which no --policy offers."""


TWO_TIERED = ["seesaw", "neo", "overlap", "apex", "hybrid", *RESHARDING]
"""Policies that know of a host tier; the others are tested in test_policies.py."""


def _policy(name: str, budget: int) -> Policy:
    return RESHARDING[name](budget) if name in RESHARDING else make_policy(name, budget)


SECONDS = st.floats(1e-6, 1e-2)
PREDICTORS = st.builds(
    LinearPredictor,
    num_layers=st.integers(1, 80),
    linear=SECONDS,
    row=st.sampled_from([0.0, 1e-6]),
    key=SECONDS,
    prompt_token=SECONDS,
    host_key=SECONDS,
    exchange=st.sampled_from([0.0, 1e-4]),
    overhead=st.sampled_from([0.0, 1e-3]),
    swap_token=SECONDS,
    transition=st.floats(0, 3),
)
PREDICTOR_OR_NONE = st.one_of(st.none(), PREDICTORS)
HOST_BLOCKS = st.sampled_from([0, 1, 50, 2000])
COHORTS = st.lists(st.builds(Cohort, *[st.integers(1, 99)] * 3), max_size=3)


@st.composite
def _loads(draw: st.DrawFn) -> Load:
    total, host_blocks = draw(st.integers(1, 1000)), draw(HOST_BLOCKS)
    running = draw(st.integers(0, 300))
    first = draw(st.integers(0, 3000))
    cohorts = draw(COHORTS) if host_blocks else []
    under_way = sum(cohort.sequences for cohort in cohorts)
    ready_host = draw(st.integers(0, 300)) if host_blocks else 0
    layouts = draw(st.integers(1, 2))
    return Load(
        previous=draw(st.sampled_from([None, Decision(0, 5), Decision(64, 0, layout=layouts - 1)])),
        waiting_tokens=first + draw(st.sampled_from([0, 10**5])),
        first_waiting_tokens=first,
        running_decodes=running,
        ready_decodes=draw(st.integers(0, running)),
        ready_prefills=draw(st.integers(0, 2)),
        context_tokens=running * draw(st.integers(1, 500)),
        free_blocks=draw(st.integers(0, total)),
        total_blocks=total,
        block_size=draw(st.sampled_from([1, 16])),
        free_slots=draw(st.integers(0, 256)),
        steps_in_flight=draw(st.integers(0, 3)),
        pipeline_depth=draw(st.integers(1, 4)),
        expected_growth=draw(st.integers(0, total - 1)),
        layouts=LayoutsLoad(current=draw(st.integers(0, layouts - 1)), count=layouts),
        host=HostLoad(
            decodes=ready_host + under_way,
            ready=ready_host,
            context_tokens=(ready_host + under_way) * draw(st.integers(1, 500)),
            moving=draw(st.integers(0, 3)) if host_blocks else 0,
            free_blocks=draw(st.integers(0, host_blocks)),
            total_blocks=host_blocks,
            cohorts=tuple(cohorts),
        ),
        longest_remaining=draw(st.integers(0, 1000)),
        predictor=draw(PREDICTOR_OR_NONE),
    )


@pytest.mark.parametrize("name", TWO_TIERED)
@settings(deadline=None, max_examples=40)
@given(load=_loads(), budget=st.integers(1, 4096))
def test_no_policy_asks_for_what_is_not_there(name: str, load: Load, budget: int) -> None:
    policy = _policy(name, budget)
    decision = policy.decide(load)
    assert policy.decide(load) == decision, "a policy is a pure function"
    assert 0 <= decision.prefill_tokens <= budget
    assert 0 <= decision.decodes <= load.ready_decodes
    assert 0 <= decision.host.swap_out <= load.ready_decodes
    assert 0 <= decision.host.swap_in <= load.host.ready
    assert 0 <= decision.layout < load.layouts.count
    first, second = decision.host.decodes
    under_way = sum(cohort.sequences for cohort in load.host.cohorts)
    assert min(first, second) >= 0
    assert first + second + decision.host.swap_in <= load.host.ready + under_way
    if decision.host.strategy == "overlap":
        assert second == 0 and first + decision.host.swap_in <= load.host.ready
    if decision.host.strategy == "device":
        assert decision.host.decodes == (0, 0)
    if not load.host.total_blocks:
        assert (
            not decision.host.park
            and not decision.host.preempt
            and decision.host.strategy == "device"
        )
    if load.predictor is None:
        assert decision.host.strategy == "device"


@pytest.mark.parametrize("name", TWO_TIERED)
@settings(deadline=None, max_examples=25)
@given(load=_loads(), hosted=st.integers(1, 300))
def test_an_idle_device_is_given_something_to_do(name: str, load: Load, hosted: int) -> None:
    """Host sequences come back to an idle device, or go on where they are, whatever is
    predicted."""
    idle = replace(
        load,
        **dict.fromkeys(
            ("running_decodes", "ready_decodes", "ready_prefills", "context_tokens"), 0
        ),
        **dict.fromkeys(("steps_in_flight", "expected_growth"), 0),
        host=replace(
            load.host,
            decodes=hosted,
            ready=hosted,
            context_tokens=100 * hosted,
            moving=0,
            total_blocks=2000,
            cohorts=(),
        ),
    )
    decision = _policy(name, 512).decide(idle)
    turns = decision.layout != idle.layouts.current
    assert decision.host.swap_in or sum(decision.host.decodes) or decision.prefill_tokens or turns
