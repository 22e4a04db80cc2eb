"""Draft tokens in virtual time: how many are right, what they cost, and that no policy gets slower
by them."""

from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.predictor import layout_predictors
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.simulator import SimulationResult, Workload, burst, fixed_lengths, simulate
from nanoserve.lab.simulator.executor import (
    DUMMY_TOKEN,
    END_TOKEN,
    SimulatedDrafter,
    SimulatedExecutor,
)
from nanoserve.layout import ParallelLayout
from nanoserve.request import SamplingParams
from nanoserve.scheduler import Decision, Load, Policy, make_policy
from nanoserve.scheduler.optional import DraftRow
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from tests.lab.simulator.linear_times import LinearTimes


@dataclass
class Three(Policy):
    """A policy that wants three draft tokens of each row."""

    policy: Policy

    def decide(self, load: Load) -> Decision:
        return replace(self.policy.decide(load), draft_tokens=3)


def _run(
    policy: str | Policy, drafter: SimulatedDrafter | None, *, sequences: int, stages: int = 1
) -> SimulationResult:
    costs = StepCosts(
        load_shape("llama-3.1-8b"), load_machine("h100"), ParallelLayout(pipeline_parallel=stages)
    )
    return simulate(
        make_policy(policy, 2048) if isinstance(policy, str) else policy,
        costs,
        Workload(burst(), fixed_lengths(100, 120), limit=sequences),
        num_blocks=20_000,
        predictors=layout_predictors([costs]),
        drafter=drafter,
    )


def test_draft_tokens_are_right_as_often_as_the_drafter_says() -> None:
    rates = (0.9, 0.6, 0.3)
    result = _run(Three(make_policy("sarathi", 2048)), SimulatedDrafter(rates, 0.0), sequences=32)
    rows = result.draft_tokens / 3
    assert [count / rows for count in result.accepted_draft_tokens[:3]] == pytest.approx(
        [*accumulate(rates, mul)], abs=0.05
    )
    assert result.accepted_share == sum(result.accepted_draft_tokens) / result.draft_tokens
    assert (result.output_tokens, result.requests) == (32 * 120, 32)


@pytest.mark.parametrize("policy", ["sarathi", "throttling", "adaptive"])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("sequences", [1, 64, pytest.param(400, marks=pytest.mark.slow)])
def test_no_policy_gets_slower(policy: str, stages: int, sequences: int) -> None:
    plain = _run(policy, None, sequences=sequences, stages=stages)
    useless = _run(policy, SimulatedDrafter((0.0,)), sequences=sequences, stages=stages)
    good = _run(policy, SimulatedDrafter((0.8,)), sequences=sequences, stages=stages)
    assert useless.seconds <= plain.seconds / 0.98
    assert good.seconds <= plain.seconds / 0.98
    if sequences == 1:
        assert plain.seconds / good.seconds > 2
    assert (good.output_tokens, good.steps > 0) == (plain.output_tokens, True)


def test_a_sequence_ends_in_the_middle_of_its_draft_tokens() -> None:
    """Its fourth token is the last one: of three right draft tokens, two and the end."""
    executor = SimulatedExecutor(LinearTimes(), drafter=SimulatedDrafter((1.0,)))
    begin = Begin(0, (1, 1), 2, 0, 4, SamplingParams())
    executor.submit(
        StepPlan(
            0, begin=(begin,), rows=(Row(0, 0, (1, 1), True, (0,), draft=DraftRow(propose=3)),)
        )
    )
    ((first,),) = [result.answers for result in executor.collect(None)]
    assert (first.tokens, first.draft) == ((DUMMY_TOKEN,), (DUMMY_TOKEN,) * 3)
    executor.submit(StepPlan(1, rows=(Row(0, 2, (1, 1, 1, 1), True, draft=DraftRow(verify=3)),)))
    ((second,),) = [result.answers for result in executor.collect(None)]
    assert second.tokens == (DUMMY_TOKEN, DUMMY_TOKEN, END_TOKEN)


def test_drafting_takes_its_share_behind_the_last_stage() -> None:
    executor = SimulatedExecutor(
        LinearTimes(num_stages=2, step=0.5), drafter=SimulatedDrafter((1.0,), 0.1)
    )
    begin = Begin(0, (1, 1), 2, 0, 9, SamplingParams())
    executor.submit(
        StepPlan(
            0, begin=(begin,), rows=(Row(0, 0, (1, 1), True, (0,), draft=DraftRow(propose=3)),)
        )
    )
    (result,) = executor.collect(None)
    assert result.draft_seconds == pytest.approx(3 * 0.1 * (0.5 + 0.5))
    assert (result.seconds, executor.now()) == pytest.approx((1.0, 1.3))


@pytest.mark.parametrize(
    "text", ["", "much", "0.8,", "1.2", "-0.1", "nan", "0.8:", "0.8:2", "0.8:0.1:0.1"]
)
def test_drafters_that_cannot_be(text: str) -> None:
    if text == "0.8:":
        assert SimulatedDrafter.parse(text) == SimulatedDrafter((0.8,))
        return
    with pytest.raises(UsageError) as refused:
        SimulatedDrafter.parse(text)
    assert "\n" not in str(refused.value)


def test_draft_tokens_and_host_memory_are_refused_together() -> None:
    costs = StepCosts(load_shape("llama-3.1-8b"), load_machine("h100"))
    requests = Workload(burst(), fixed_lengths(10, 5), limit=1)
    with pytest.raises(UsageError, match="leave one of them out"):
        simulate(
            make_policy("sarathi", 64),
            costs,
            requests,
            num_blocks=100,
            host_blocks=5,
            drafter=SimulatedDrafter((0.5,)),
        )
