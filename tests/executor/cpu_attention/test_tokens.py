"""Where the CPU attends for some sequences, every answer is that of one device with room for all:
for every family."""

from functools import reduce
from itertools import cycle, islice
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.executor.cpu_attention.families import (
    FAMILIES,
    ROUNDED,
    model_with_tokenizer,
    small_model,
)
from tests.executor.cpu_attention.lives import (
    STRATEGIES,
    Case,
    HybridSeen,
    at_random,
    check,
    live_through,
)

CASES = st.builds(
    Case,
    strategy=st.sampled_from(STRATEGIES),
    token_budget=st.sampled_from([5, 24, 256]),
    num_blocks=st.integers(16, 30),
    host_blocks=st.sampled_from([5, 14, 20, 60]),
    max_num_seqs=st.sampled_from([2, 4, 256]),
    prefix_caching=st.booleans(),
    seed=st.integers(0, 10_000),
)


def together(lives: list[HybridSeen]) -> HybridSeen:
    """Sum up lives and check that they have shown what they were made for.

    How many sequences are preempted depends on how soon the CPU answers; the tests of lost threads
    preempt for certain.
    """
    seen = reduce(add, lives)
    assert min(seen.cached_tokens, seen.copies, seen.aborted, seen.chunks) > 0, seen
    assert min(seen.moves["out"], seen.moves["in"]) > 0, seen
    return seen


FEW = ("mistral", "qwen3", "qwen3_moe")
"""One window for all layers, windows of some layers and wide heads, experts; the slow tests take
every family."""


def test_fixed_lives_under_every_strategy() -> None:
    """Half of them by lot, half under one of the policies."""
    cases = [(family, Case("by lot", seed=number)) for number, family in enumerate(FEW)]
    cases.append((ROUNDED, Case("by lot", seed=len(FEW))))
    policies = zip(islice(cycle(FEW), 4), STRATEGIES[:4], strict=True)
    cases += [(family, Case(policy, prefix_caching=False, seed=3)) for family, policy in policies]
    models = [(small_model(family), case) for family, case in cases]
    lives = [check(model, case, at_random(model, case.seed)) for model, case in models]
    seen = together(lives)
    assert min(seen.beside_device[strategy] for strategy in ("overlap", "asymmetric")) > 0, seen
    assert seen.host_rows["finished by asymmetric"] > 0, (
        "no cohort part-way through its layers was finished"
    )


@settings(max_examples=6, deadline=None)
@given(family=st.sampled_from(FEW), case=CASES, requests=st.integers(2, 6))
def test_any_life_of_a_few_families(family: str, case: Case, requests: int) -> None:
    model = small_model(family)
    check(model, case, at_random(model, case.seed)[:requests])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_under_every_strategy(family: str) -> None:
    model = small_model(family)
    lives = []
    for seed, strategy in enumerate(STRATEGIES):
        case = Case(strategy, prefix_caching=seed % 2 == 0, seed=seed)
        lives.append(check(model, case, at_random(model, case.seed)))
        assert lives[-1].beside_device.total() > 0, strategy
    together(lives)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(family=st.sampled_from(FAMILIES), case=CASES)
def test_many_lives_of_any_family(family: str, case: Case) -> None:
    model = small_model(family)
    check(model, case, at_random(model, case.seed))


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_all_that_a_request_may_ask_for_is_had_on_the_host(strategy: str) -> None:
    """Samples by seed, penalties, log probabilities of prompts and answers, JSON by a schema."""
    model = model_with_tokenizer(torch.float32)
    case = Case("all on the host, " + strategy, num_blocks=30, host_blocks=200)
    seen = check(model, case, at_random(model, 3))
    decodes = sum(max(0, len(one.output_tokens) - 1) for one in seen.sequences.values())
    assert seen.host_rows[strategy] >= decodes > 0, "the first token of each is its prompt's"


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_in_bfloat16_only_rounding_makes_a_difference(strategy: str) -> None:
    """It may decide between tokens that are about equally likely, after which an answer is another
    one."""
    model = model_with_tokenizer(torch.bfloat16)
    case = Case("all on the host, " + strategy, num_blocks=30, host_blocks=200)
    sequences = live_through(model, case, at_random(model, 3)).sequences
    equal = [
        sequences[key].output_tokens == expected.tokens for key, expected in model.expected.items()
    ]
    assert sum(equal) > len(equal) / 2
