"""Workers answer what one process answers, whatever is scheduled how: tokens and log probabilities.

Two processes at a time. Larger layouts, families and compiled layers are in `test_layouts`.
"""

from contextlib import closing
from itertools import cycle

import pytest

from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.scheduler.policies import POLICIES
from tests.executor.workers.loads import (
    ROOMY_BLOCKS,
    TIGHT_BLOCKS,
    Case,
    Reference,
    Seen,
    pairwise,
    start_workers,
)

ABLATIONS = ("without_wt", "without_ut", "without_decode_throttling")
EVERY_POLICY = (*POLICIES, *(f"throttling {ablation}" for ablation in ABLATIONS))
SIZES = {
    "token_budget": (7, 24),
    "num_blocks": (TIGHT_BLOCKS, ROOMY_BLOCKS),
    "max_num_seqs": (3, 256),
    "prefix_caching": (True, False),
    "depth": (2, 1),
}
ONCE = [
    Case(policy, **sizes, seed=seed)
    for seed, (policy, sizes) in enumerate(
        zip(EVERY_POLICY, cycle(pairwise(**SIZES)), strict=False)
    )
]
"""Each policy once, and each size with each of the others."""
CASES = [
    Case(**chosen, seed=seed) for seed, chosen in enumerate(pairwise(policy=EVERY_POLICY, **SIZES))
]
"""Each policy with each size."""
CASES_OF_RANKS = [
    case
    for case in CASES
    if case.depth == 1 and case.policy in ("sarathi", "throttling", "prefill-first")
]
COUPLED_CASES = [case for case in CASES if case.depth == 2 and case.policy in POLICIES]


def everything_happened(seen: Seen) -> bool:
    """Whether the lives have shown what they are there for. How many run together, and so whether
    any is preempted, depends on how fast workers answer."""
    return min(seen.cached_tokens, seen.copies, seen.aborted, seen.chunks) > 0


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ONCE, id="once"),
        pytest.param(CASES, id="with each size", marks=pytest.mark.slow),
    ],
)
def test_every_policy_on_two_stages(
    two_stages: WorkersExecutor, reference: Reference, cases: list[Case]
) -> None:
    """With the sizes of steps and of the pool, prefix caching, and plans in flight."""
    seen = reference.check(two_stages, cases)
    assert everything_happened(seen), seen
    assert seen.together == 2


@pytest.mark.parametrize(
    "cases",
    [pytest.param(ONCE[::4], id="few"), pytest.param(ONCE, id="once", marks=pytest.mark.slow)],
)
def test_rounded_weights_on_two_stages(
    rounded_stages: WorkersExecutor, rounded: Reference, cases: list[Case]
) -> None:
    seen = rounded.check(rounded_stages, cases)
    assert everything_happened(seen), seen
    assert seen.together == 2


@pytest.mark.slow
def test_two_ranks_of_one_stage(two_ranks: WorkersExecutor, reference: Reference) -> None:
    seen = reference.check(two_ranks, CASES_OF_RANKS)
    assert everything_happened(seen), seen
    assert seen.together == 1


@pytest.mark.slow
def test_plans_that_come_with_the_hidden_states(reference: Reference) -> None:
    """The coupled design knows no less than the decoupled one, only later."""
    with closing(start_workers(reference, pipeline_parallel=2, metadata="coupled")) as workers:
        seen = reference.check(workers, COUPLED_CASES)
    assert everything_happened(seen), seen
    assert seen.together == 2


def test_a_scheduler_that_begins_anew_names_sequences_as_the_one_before_did(
    two_stages: WorkersExecutor, reference: Reference
) -> None:
    """One that gave up in the middle has told the workers nothing of it."""
    case = Case("sarathi")
    for _ in range(2):
        steps = reference.engine(two_stages, case)
        for request in reference.requests:
            steps.add(request)
        for _ in range(4):
            steps.step()
        while steps.scheduler.steps_in_flight:
            for result in two_stages.collect(None):
                steps.scheduler.apply(result, two_stages.now())
    reference.check(two_stages, [case])
