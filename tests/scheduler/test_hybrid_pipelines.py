"""Hybrid policies where several plans are in flight: equal shares of the decodes, and of the CPU's
time."""

from dataclasses import replace

import pytest

from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies.hybrid import HybridByPrediction
from tests.scheduler.test_hybrid import ALL, DECODES, hosting

STAGES = replace(DECODES, pipeline_depth=2)


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
def test_decodes_are_divided_among_the_plans_in_flight(policy: Policy) -> None:
    assert policy.decide(STAGES).decodes == 5
    assert policy.decide(replace(STAGES, ready_decodes=3)).decodes == 3


def test_the_cpu_is_asked_for_no_more_than_it_serves_until_the_next_plan_ends() -> None:
    # Five decodes with half of the keys: 4 (1 + 0.5) = 6 s from stage to stage, but a plan ends
    # every 3 s, in which the CPU serves six sequences of half a second each. A cohort gets a
    # quarter of that, so that others begin behind it.
    decision = HybridByPrediction(512).decide(hosting(STAGES, 40))
    assert (decision.host.strategy, decision.host.decodes) == ("overlap", (1, 0))
