"""With `batch_invariant`, the log-probabilities of an answer have the same bits in any batch,
chunking and pipeline."""

import json
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.errors import NanoserveError
from nanoserve.layout import ParallelLayout
from triton_ops.cpu import cpu_operators

pytestmark = pytest.mark.skipif(
    not cpu_operators().expected, reason="the C++ operators cannot be built"
)

TEXT = (
    "One day a little fox found a red kite in the tall grass and ran home to show it to her "
    "mother. " * 4
)
PROMPTS = [
    TEXT[start : start + length]
    for start, length in enumerate((3, 40, 350, 9, 120, 77, 201, 15) * 2)
]
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "max_position_embeddings": 512,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True)


def answers(llm: LLM, *, alone: bool) -> list[Any]:
    found = (
        [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        if alone
        else llm.generate(PROMPTS, PARAMS)
    )
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in found]


def open_llm(**settings: Any) -> LLM:
    return LLM(
        **{"dtype": "bfloat16", "batch_invariant": True, "max_model_len": 512, "seed": 1} | settings
    )


@pytest.fixture(scope="module", params=["storyteller", "int4", "mixtral"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    if request.param == "mixtral":
        path = tmp_path_factory.mktemp("mixtral") / "config.json"
        path.write_text(json.dumps(MIXTRAL))
        return {"model": f"dummy:{path}"}
    return {"quantization": "int4"} if request.param == "int4" else {}


@pytest.fixture(scope="module")
def wanted(model: dict[str, Any]) -> list[Any]:
    with open_llm(**model, enable_prefix_caching=False) as llm:
        return answers(llm, alone=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 64, "policy": "throttling", "max_num_seqs": 5},
        {"max_num_batched_tokens": 33, "kv_cache_memory": 1 << 20},
        pytest.param({"pipeline_parallel": 2, "policy": "throttling"}, marks=pytest.mark.slow),
        pytest.param(
            {"pipeline_parallel": 2, "max_num_batched_tokens": 50}, marks=pytest.mark.slow
        ),
        pytest.param({"policy": "overlap", "kv_cache_memory": 1 << 20}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_depend_on_nothing_else(
    settings: dict[str, Any], model: dict[str, Any], wanted: list[Any]
) -> None:
    with open_llm(**model, **settings) as llm:
        assert answers(llm, alone=False) == wanted


@pytest.mark.slow
def test_two_ranks_answer_as_themselves() -> None:
    with open_llm(tensor_parallel=2, enable_prefix_caching=False, max_num_batched_tokens=64) as llm:
        assert answers(llm, alone=False) == answers(llm, alone=True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"device": "cuda"}, "for --device cpu, not cuda"),
        ({"tensor_parallel": 4}, "one degree of --tp, 1 or 2"),
        (
            {"decode_layout": ParallelLayout(tensor_parallel=2), "pipeline_parallel": 2},
            "one degree of --tp",
        ),
        ({"dtype": "float32"}, "choose --dtype bfloat16"),
    ],
    ids=str,
)
def test_what_cannot_be_promised_is_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(NanoserveError, match=problem):
        open_llm(**settings)
