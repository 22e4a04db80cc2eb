"""Random lives with a host tier and several parallel layouts, under every policy and under ones
nobody would write."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.load import Decision
from tests.scheduler.lives import WINDOWS, lives
from tests.scheduler.tier_lives import DECIDED, TIERS, AlsoUsingTheHost, AtRandom, check


@settings(max_examples=100, deadline=None)
@given(life=lives(), memory=TIERS, decided=DECIDED)
def test_whatever_is_decided_every_request_gets_its_tokens(
    life: dict, memory: dict, decided: list[Decision]
) -> None:
    check(AtRandom(decided), life, memory)


@settings(max_examples=100, deadline=None)
@given(life=lives(WINDOWS), memory=TIERS, decided=DECIDED)
def test_windows_are_parked_and_swapped_and_change_layouts(
    life: dict, memory: dict, decided: list[Decision]
) -> None:
    """Attention on the CPU takes no cache groups, so the host only keeps."""
    check(
        AtRandom(
            [replace(decision, host=replace(decision.host, decodes=(0, 0))) for decision in decided]
        ),
        life,
        memory,
    )


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30, deadline=None)
@given(life=lives(), memory=TIERS, data=st.data())
def test_every_policy_with_two_tiers_and_several_layouts(
    name: str, life: dict, memory: dict, data: st.DataObject
) -> None:
    policy = make_policy(name, life["token_budget"])
    check(
        AlsoUsingTheHost(policy) if data.draw(st.booleans(), label="uses the host") else policy,
        life,
        memory,
    )
