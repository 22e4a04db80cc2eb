"""Prompts computed in one parallel layout, answers decoded in another: every request answers what
it does alone."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.layout import ParallelLayout
from nanoserve.record.times import ReshardTimes
from nanoserve.scheduler.optional import LayoutPlan
from nanoserve.scheduler.plan import StepPlan
from tests.executor.workers.loads import ROOMY_BLOCKS, TIGHT_BLOCKS, Case, Reference, start_workers
from tests.executor.workers.test_layouts import check_workers, reference_of

HOST_BLOCKS = 24  # one sequence of full length fits, and hardly a second one
CASES = [
    Case("minimizing", token_budget=24, num_blocks=TIGHT_BLOCKS, host_blocks=HOST_BLOCKS, seed=1),
    Case(
        "minimizing",
        num_blocks=ROOMY_BLOCKS,
        host_blocks=3 * HOST_BLOCKS,
        prefix_caching=False,
        seed=2,
    ),
    Case(
        "prefill-prioritizing",
        num_blocks=ROOMY_BLOCKS,
        host_blocks=ROOMY_BLOCKS,
        max_num_seqs=3,
        seed=3,
    ),
    Case(
        "decode-prioritizing",
        token_budget=7,
        num_blocks=TIGHT_BLOCKS,
        host_blocks=HOST_BLOCKS,
        seed=4,
    ),
]


def start_pair(reference: Reference, prefill: str, decode: str) -> WorkersExecutor:
    first, second = map(ParallelLayout.parse, (prefill, decode))
    return start_workers(
        reference,
        host_blocks=ROOMY_BLOCKS,
        pipeline_parallel=first.pipeline_parallel,
        tensor_parallel=first.tensor_parallel,
        decode_layout=second,
        policy="seesaw",
    )


def check(reference: Reference, workers: WorkersExecutor, cases: list[Case]) -> None:
    seen = reference.check(workers, cases)
    assert min(seen.cached_tokens, seen.copies, seen.aborted, seen.swaps, seen.chunks) > 0, seen
    assert seen.transitions >= 5 * len(cases), seen


@pytest.fixture(scope="module")
def two_layouts(reference: Reference) -> Iterator[WorkersExecutor]:
    with closing(start_pair(reference, "P2", "T2")) as workers:
        yield workers


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.policy == "minimizing" else pytest.mark.slow)
        for case in CASES
    ],
    ids=lambda case: f"{case.policy} {case.num_blocks}",
)
def test_answers_are_those_of_one_process(
    reference: Reference, two_layouts: WorkersExecutor, case: Case
) -> None:
    seen = reference.check(two_layouts, [case])
    assert seen.transitions >= 5 and seen.swaps > 0, seen


def test_what_moved_is_told_by_every_worker(two_layouts: WorkersExecutor) -> None:
    two_layouts.take_times()
    target = 1 - two_layouts.layout
    two_layouts.submit(StepPlan(7, layouts=LayoutPlan(transition=target)))
    (result,) = two_layouts.collect(None)
    assert result.step == 7 and two_layouts.layout == target
    moves = [times for times in two_layouts.take_times() if isinstance(times, ReshardTimes)]
    assert sorted(move.rank for move in moves) == [0, 1]
    assert all(move.num_bytes > 0 and move.began < move.ended for move in moves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "prefill", "decode"),
    [
        ("qwen3_moe", {}, "T2P2", "T4"),
        ("glm4", {"num_hidden_layers": 4}, "P4", "T4"),
        (
            "llama",
            {"num_hidden_layers": 4, "vocab_size": 155, "intermediate_size": 93},
            "T2P2",
            "P4",
        ),
        ("llama-tied-biased", {}, "T2", "P2"),
        ("mistral", {"quantization": "int8", "intermediate_size": 128}, "P2", "T2"),
        (
            "gemma3_text",
            {
                "num_hidden_layers": 6,
                "layer_types": [
                    *(["sliding_attention"] * 4),
                    "full_attention",
                    "sliding_attention",
                ],
            },
            "T2P2",
            "P4",
        ),
        ("gpt_oss", {}, "T2", "P2"),
    ],
)
def test_layouts_with_other_families(
    family: str, sizes: dict[str, Any], prefill: str, decode: str, tmp_path: Path
) -> None:
    """Two of four tensor-parallel ranks have the same key-value head. Layouts change in both
    directions, and ordinary policies stay in the first one. `tests/models/test_shards` and
    `tests/models/test_resharding` cut every family."""
    reference = reference_of(family, tmp_path, **sizes)
    with closing(start_pair(reference, prefill, decode)) as workers:
        check(reference, workers, CASES[::2])
        if decode == "T4":
            check_workers(reference, workers, workers.capacities[0].pipeline_depth)


@pytest.mark.parametrize("policy", [pytest.param("sarathi", marks=pytest.mark.slow), "throttling"])
def test_ordinary_policies_preempt_by_swaps(
    reference: Reference, two_layouts: WorkersExecutor, policy: str
) -> None:
    """In the first layout alone, a pipeline: what moves does so beside the steps of others."""
    # Half of the groups have windows, which leave much of their blocks: few more than one sequence
    # holds are tight.
    case = Case(policy, token_budget=24, num_blocks=15, host_blocks=3 * HOST_BLOCKS, seed=5)
    seen = reference.check(two_layouts, [case])
    assert seen.swaps > 0 and seen.transitions == 0, seen
