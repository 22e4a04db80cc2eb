"""Random lives of models with recurrent states, on few slots: chunks, preemption, the prefix cache,
several samples, aborts, two plans in flight and deaths of workers, under every policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.scheduler import POLICIES, make_policy
from tests.scheduler.lives import lives
from tests.scheduler.states import STATES
from tests.scheduler.test_losses import DEATHS
from tests.scheduler.tier_lives import check

ALONE = {"host_blocks": 0, "other_layouts": [], "swap_delay": 0, "num_layers": 1}
ALONE |= {"cpu_is_done": [True], "times": None, "drafter": None}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(life=lives(), states=STATES, deaths=st.one_of(st.just(frozenset[int]()), DEATHS))
def test_every_request_gets_the_tokens_it_would_get_alone(
    policy: str, life: dict, states: dict, deaths: frozenset[int]
) -> None:
    check(make_policy(policy, life["token_budget"]), life, ALONE | states, deaths)
