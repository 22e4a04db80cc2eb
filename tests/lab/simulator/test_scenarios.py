"""The papers' drawings under our policies: golden steps, and what each drawing says."""

from itertools import pairwise
from pathlib import Path

import pytest

from nanoserve.lab.explanation import ExplainedRun, ExplainedStep
from nanoserve.lab.simulator.scenarios import SCENARIOS
from nanoserve.scheduler.policies import parse_policies

GOLDEN = Path(__file__).with_name("scenarios.txt")
"""A line for each run; ``python -m tests.lab.simulator.test_scenarios`` prints it."""


def runs_of(name: str) -> dict[str, ExplainedRun]:
    scenario = SCENARIOS[name]
    policies = parse_policies(scenario.policies, scenario.token_budget)
    return {policy: scenario.run(policy, made) for policy, made in policies.items()}


def tokens(step: ExplainedStep) -> tuple[int, int, int]:
    """Prompt tokens, decodes on the device, and rows on the host."""
    prompt = sum(row.count for row in step.rows if row.kind == "prefill")
    tiers = [row.tier for row in step.rows if row.kind == "decode"]
    return prompt, tiers.count("device"), tiers.count("host")


def spelled(step: ExplainedStep) -> str:
    """Prompt tokens + decodes, then what the host does (h), swaps out (o) and in (i), and a new
    layout (>)."""
    prompt, device, host = tokens(step)
    directions = [swap.direction for swap in step.swaps]
    parts = {"h": host, "o": directions.count("out"), "i": directions.count("in")}
    moved = "".join(f"{letter}{number}" for letter, number in parts.items() if number)
    return f"{prompt}+{device}{moved}" + ("" if step.transition is None else f">{step.transition}")


def spell_out() -> list[str]:
    return [
        f"{name} {policy}: {' '.join(map(spelled, run.steps))}"
        for name in SCENARIOS
        for policy, run in runs_of(name).items()
    ]


def test_the_drawings_are_as_they_were() -> None:
    assert spell_out() == GOLDEN.read_text().splitlines()


def test_prompt_tokens_are_spread_and_stop_at_the_threshold() -> None:
    sarathi, throttling = runs_of("gllm-7").values()
    assert max(tokens(step)[0] for step in sarathi.steps) > 2 * max(
        tokens(step)[0] for step in throttling.steps
    )
    bounds = {step.bound for step in throttling.steps}
    assert {
        "equation 3: #WP / #T",
        "equation 3: MinP",
        "equation 3: KVfree < KVthresh, no prompt tokens",
    } <= bounds
    for step in throttling.steps:
        if step.load["free_blocks"] < 0.05 * step.load["total_blocks"]:
            assert tokens(step)[0] == 0


def test_decodes_are_divided_among_the_stages() -> None:
    sarathi, throttling = runs_of("gllm-8").values()
    # two of four stages have nothing to do
    assert {tokens(step)[1] for step in sarathi.steps[2:]} == {8}
    assert {tokens(step)[1] for step in throttling.steps if step.load["running_decodes"] == 16} == {
        4
    }


def test_a_cohort_has_its_token_after_one_step_more_than_layers() -> None:
    layers, overlap = SCENARIOS["apex-4"].num_layers, runs_of("apex-4")["overlap"]
    begun = [step.step for step in overlap.steps if tokens(step)[2]]
    assert len(begun) > 3
    assert {later - earlier for earlier, later in pairwise(begun)} == {layers + 1}
    host = {row.sequence for row in overlap.steps[begun[0]].rows if row.tier == "host"}
    answered = {
        one.sequence: step.step
        for step in reversed(overlap.steps[begun[0] :])
        for one in step.answers
    }
    assert {answered[sequence] for sequence in host} == {begun[0] + layers}


def test_asymmetric_steps_hold_prompts_and_sequences_of_both_tiers() -> None:
    steps = [step for step in runs_of("apex-2")["neo"].steps if step.strategy == "asymmetric"]
    assert any(min(tokens(step)) > 0 for step in steps)


def test_the_layout_changes_when_the_pool_is_full_or_empty() -> None:
    turns = [step for step in runs_of("seesaw-2")["seesaw"].steps if step.transition is not None]
    assert [step.transition for step in turns] == [1, 0, 1]
    full, empty, rest = turns
    assert (full.free_host, empty.free_host, rest.load["waiting_tokens"]) == (
        0,
        empty.total_host,
        0,
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_decision_says_what_bound_it(name: str) -> None:
    assert all(step.bound for run in runs_of(name).values() for step in run.steps)


if __name__ == "__main__":
    print("\n".join(spell_out()))
