"""Layouts with one family, compiled layers in a pipeline: up to four processes at a time."""

from contextlib import closing
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.models.hub import ResolvedModel
from tests.executor.workers.loads import ROOMY_BLOCKS, TIGHT_BLOCKS, Case, Reference, start_workers
from tests.models.test_shards import write_checkpoint
from triton_ops.cpu import cpu_operators

pytestmark = pytest.mark.slow

CASES = [
    Case("throttling", token_budget=24, num_blocks=TIGHT_BLOCKS, seed=1),
    Case("sarathi", token_budget=7, num_blocks=TIGHT_BLOCKS, max_num_seqs=3, seed=2),
    Case("adaptive", num_blocks=ROOMY_BLOCKS, prefix_caching=False, depth=1, seed=3),
    Case("prefill-first", num_blocks=ROOMY_BLOCKS, seed=4),
]
PROMPTS = ["Once upon a time", "The dog and the cat went to the park. They", "Lily"]


def reference_of(
    family: str, directory: Path, *, quantization: str | None = None, **sizes: int
) -> Reference:
    """In the family's own small vocabulary, for which there is no tokenizer."""
    write_checkpoint(family, directory, **sizes)
    return Reference(
        ResolvedModel(family, directory, directory), schemas=False, quantization=quantization
    )


def check(reference: Reference, **layout: object) -> None:
    with closing(start_workers(reference, **layout)) as workers:
        check_workers(reference, workers, layout.get("pipeline_parallel", 1))


def check_workers(reference: Reference, workers: WorkersExecutor, stages: object) -> None:
    seen = reference.check(workers, CASES)
    # How many run together, and so whether any is preempted, depends on how fast workers answer.
    assert min(seen.cached_tokens, seen.copies, seen.aborted, seen.chunks) > 0, seen
    assert seen.together == stages


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel": 3, "pipeline_split": (1, 2, 1)},
        {"tensor_parallel": 4},  # two ranks of four have the same key-value head
    ],
    ids=str,
)
def test_layouts_of_one_family(layout: dict[str, object], tmp_path: Path) -> None:
    """Four stages, and two of two ranks, are in `test_resharding`; two workers in
    `test_equality`."""
    reference = reference_of(
        "llama", tmp_path, num_hidden_layers=4, vocab_size=155, intermediate_size=93
    )
    check(reference, **layout)


def test_rounded_experts(tmp_path: Path) -> None:
    """`test_equality` and `test_resharding` round the weights of other families."""
    reference = reference_of(
        "qwen3_moe", tmp_path, quantization="int8", intermediate_size=128, moe_intermediate_size=96
    )
    check(reference, pipeline_parallel=2, tensor_parallel=2)


def test_rounded_weights_whose_groups_two_ranks_do_not_divide_evenly(tmp_path: Path) -> None:
    """One has two groups of 32 columns, the other one has one."""
    check(
        reference_of("llama", tmp_path, quantization="int4", intermediate_size=96),
        tensor_parallel=2,
    )


@pytest.mark.parametrize(
    "layout", [{"pipeline_parallel": 4}, {"pipeline_parallel": 2, "tensor_parallel": 2}], ids=str
)
def test_coupled_plans_through_more_processes(layout: dict[str, int], tmp_path: Path) -> None:
    reference = reference_of("llama", tmp_path, num_hidden_layers=4)
    check(reference, metadata="coupled", **layout)


@pytest.mark.parametrize(
    ("layout", "compiled"),
    [
        ({"pipeline_parallel": 2}, True),
        ({"pipeline_parallel": 2, "eager": True}, False),
        ({"tensor_parallel": 2}, True),
    ],
    ids=str,
)
def test_what_is_prepared_answers_the_same(
    storyteller: LLM, layout: dict[str, int], *, compiled: bool
) -> None:
    """While layers are compiled, if they have not been before, and then."""
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in storyteller.generate(PROMPTS, params)]
    with LLM(dtype="float32", kv_cache_memory=16 << 20, **layout) as llm:
        llm.built.start_preparing()
        for _ in range(2):
            assert [
                output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)
            ] == expected
            llm.built.prepare()
        assert llm.built.compiled == compiled
