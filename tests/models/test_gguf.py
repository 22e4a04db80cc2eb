"""GGUF files against transformers: every family and every type, with the values that the gguf
library finds in them."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from nanoserve.config.model_config import ModelConfig, SamplingDefaults
from nanoserve.config.quantization import BLOCK_TYPES
from nanoserve.errors import UsageError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import MixtureOfExperts
from nanoserve.models.gguf_directory import gguf_directory
from nanoserve.models.loading import load_model
from nanoserve.models.packed import PackedEmbedding, PackedExperts
from nanoserve.models.shards import make_shards
from nanoserve.text.tokenizer import load_tokenizer
from tests.models.test_decoder import random_tokens
from tests.models.test_resharding import assert_goes_to_and_fro
from tests.models.test_shards import LENGTHS, sharded_logits, whole_logits
from tests.models.thread_ranks import ThreadGroup
from tests.oracle.checkpoints import FAMILIES
from tests.oracle.gguf_files import write_gguf

CASES = [
    ("llama-tied-biased", "Q4_0"),
    ("llama-linear", "Q4_1"),
    ("llama-llama3", "Q4_0"),
    ("llama-yarn", "Q5_0"),
    ("mistral", "Q8_0"),
    ("llama", "Q5_1"),
    ("llama", "Q2_K"),
    ("qwen3", "Q3_K"),
    ("mixtral", "IQ4_NL"),
    ("mistral", "MXFP4"),
    ("qwen2", "F16"),
    ("qwen3", "Q4_K"),
    ("qwen3", "Q5_K"),
    ("glm4", "Q6_K"),
    ("mixtral", "Q8_0"),
    ("qwen3_moe", "BF16"),
    ("lfm2", "Q4_K"),
    ("lfm2_moe", "Q8_0"),
    ("mamba", "Q8_0"),
    ("mamba-biased", "F16"),
    ("mamba2", "Q4_K"),
    ("qwen3_next", "Q8_0"),
    ("qwen3_5_text", "Q4_K"),
    ("qwen3_5_moe_text", "F16"),
    ("jamba", "Q8_0"),
    ("jamba-dense", "F16"),
    ("granite", "Q4_K"),
    ("granitemoe", "Q8_0"),
    ("granitemoehybrid", "Q8_0"),
    ("granitemoehybrid-dense", "F16"),
    ("nemotron_h", "Q8_0"),
    ("nemotron_h-experts", "F16"),
    ("gemma2", "Q4_K"),
    ("gemma3_text", "Q8_0"),
    ("gemma3_text-scaled", "Q3_K"),
    ("gemma4_text", "Q5_1"),
    ("gemma4_text-equal", "Q8_0"),
    ("gpt_oss", "MXFP4"),
    ("gpt_oss", "F16"),
    ("smollm3", "Q8_0"),
    ("olmo3", "Q4_K"),
    ("cohere2", "Q8_0"),
    ("ministral3", "Q5_0"),
    ("deepseek_v2", "F16"),
    ("deepseek_v3", "Q8_0"),
    ("glm4_moe_lite", "Q4_0"),
]


def test_every_type_has_a_case() -> None:
    assert {kind for _, kind in CASES} == {found.name for found in BLOCK_TYPES.values()} - {"F32"}


@pytest.mark.parametrize(("family", "block_type"), CASES)
def test_logits_are_those_of_transformers(family: str, block_type: str, tmp_path: Path) -> None:
    model, directory = make_model(family, block_type, tmp_path)
    decoder, found = load_model(directory, "float32")
    quantized = block_type not in ("F16", "BF16")
    if found.moe is not None:
        assert isinstance(
            decoder.layers[-1].feed_forward, PackedExperts if quantized else MixtureOfExperts
        )
    assert isinstance(decoder.embedding, PackedEmbedding) is quantized
    tokens = random_tokens(found, 40)
    with torch.inference_mode():
        hidden = decoder(tokens, torch.arange(40), DenseCausalAttention(found, batch=1, length=40))
        logits, wanted = decoder.compute_logits(hidden), model(tokens[None]).logits[0]
    torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("family", "block_type", "layout"),
    [
        ("qwen3", "Q4_1", (1, 2)),
        ("glm4", "Q6_K", (2, 1)),
        ("qwen2", "Q8_0", (2, 2)),
        ("lfm2_moe", "Q8_0", (2, 2)),
        ("mamba", "Q8_0", (2, 2)),
        ("mamba2", "Q8_0", (1, 2)),
        ("qwen3_5_text", "Q8_0", (2, 2)),
        ("jamba", "Q8_0", (2, 2)),
        ("granitemoehybrid", "Q8_0", (1, 2)),
        ("deepseek_v3", "Q8_0", (2, 2)),
        ("gpt_oss", "MXFP4", (2, 2)),
        ("gemma4_text", "Q8_0", (1, 2)),
    ],
)
def test_shards_compute_what_the_whole_model_does(
    family: str, block_type: str, layout: tuple[int, int], tmp_path: Path
) -> None:
    _, directory = make_model(family, block_type, tmp_path)
    config = ModelConfig.from_directory(directory)
    tokens, positions = (
        random_tokens(config, sum(LENGTHS)),
        torch.cat([torch.arange(length) for length in LENGTHS]),
    )
    shards = make_shards(config, pipeline_parallel=layout[0], tensor_parallel=layout[1])
    _, wanted = whole_logits(directory, tokens, positions)
    _, logits = sharded_logits(directory, shards, tokens, positions)
    torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


def test_weights_that_change_their_layout(tmp_path: Path) -> None:
    _, directory = make_model("qwen3", "Q4_1", tmp_path)
    assert_goes_to_and_fro(directory, [((2, 1), (1, 2))])


def test_ranks_may_not_cut_a_group(tmp_path: Path) -> None:
    _, directory = make_model("glm4", "Q6_K", tmp_path)
    shard = make_shards(
        ModelConfig.from_directory(directory), pipeline_parallel=1, tensor_parallel=2
    )[0]
    with pytest.raises(
        UsageError, match=r"--tp 2 would cut groups of 256 columns in blk.0.attn_output"
    ):
        load_model(directory, "float32", shard=shard, group=ThreadGroup.alone())


def make_model(
    family: str, block_type: str, directory: Path, *, inner: int = 256, head_dim: int = 64
) -> tuple[transformers.PreTrainedModel, Path]:
    """A random model with the values that the file has, and the file as a model directory."""
    torch.manual_seed(3)
    config = FAMILIES[family]()
    for name, size in {
        "query_pre_attn_scalar": head_dim,  # of Gemma; files have no key for it
        "hidden_size": 256,
        "intermediate_size": inner,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "decoder_sparse_step": 1,
        "num_heads": 8,  # of Mamba-2
        "shared_intermediate_size": inner,
        "mamba_d_head": 64,
        "mamba_head_dim": 32,
        "moe_shared_expert_intermediate_size": inner,
        "mamba_dt_rank": 32,
        "time_step_limit": (0.0, float("inf")),  # files have no key for another
        "hidden_size_per_layer_input": inner,
    }.items():
        if getattr(config, name, None):
            setattr(config, name, size)
    if config.model_type == "gemma3_text":  # files of other patterns do not say so
        config.num_hidden_layers = 6
        config.layer_types = ["sliding_attention"] * 5 + ["full_attention"]
    if config.model_type != "gemma4_text":  # whose layers have heads of two sizes
        config.head_dim = head_dim
    config.mlp_bias, config.mlp_only_layers = False, []
    config.block_multiple_of = 256  # of LFM2
    _keep_what_files_can_say(config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        buffers = []
        for name, buffer in model.named_buffers():
            if name.endswith(("_bias", "layer_scalar")):
                buffers.append((name, buffer))
        for name, parameter in (*model.named_parameters(), *buffers):
            is_factor = "norm" in name or name.endswith("layer_scalar")
            parameter.normal_(1.0 if is_factor else 0.0, 0.1)
    write_gguf(model, directory / "model.gguf", block_type)
    return model, gguf_directory(directory / "model.gguf")


def _keep_what_files_can_say(config: transformers.PreTrainedConfig) -> None:
    """Change what llama.cpp's converter leaves out of a file."""
    if config.model_type in ("smollm3", "cohere2"):  # every fourth layer differs
        config.num_hidden_layers = 5
        kind = "sliding_attention" if config.model_type == "cohere2" else "full_attention"
        config.layer_types = [kind] * 3 + ["full_attention", kind]
        config.no_rope_layers = [1, 1, 1, 0, 1]
    if hasattr(config, "kv_lora_rank"):
        config.head_dim = config.qk_rope_head_dim  # as transformers has it
        config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim = 64, 32, 64
        config.attention_bias = False
        if config.q_lora_rank is not None:
            config.q_lora_rank = 64
        config.rope_parameters = dict(config.rope_parameters)
        if "mscale" in config.rope_parameters:
            config.rope_parameters["mscale_all_dim"] = config.rope_parameters["mscale"]


@pytest.mark.parametrize(
    ("general", "expected"),
    [
        (
            {"sampling.temp": 0.5, "sampling.top_k": 20, "basename": "smollm2"},
            SamplingDefaults(0.5, top_k=20),
        ),
        ({"basename": "smollm2"}, SamplingDefaults(0.2, 0.9)),
        ({"basename": "another"}, SamplingDefaults()),
    ],
)
def test_a_file_recommends_how_to_sample(
    general: dict[str, Any],
    expected: SamplingDefaults,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By keys of its own, or else its model card does."""
    begin = gguf.GGUFWriter.add_block_count

    def with_more(writer: gguf.GGUFWriter, count: int) -> None:
        begin(writer, count)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        for name, value in general.items():
            add = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ]
            add(f"general.{name}", value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", with_more)
    _, directory = make_model("llama", "F16", tmp_path)
    assert ModelConfig.from_directory(directory).sampling_defaults == expected


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    config.vocab_size = 300
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_gguf(model, tmp_path / "model.gguf", "F16")
    tokenizer = load_tokenizer(gguf_directory(tmp_path / "model.gguf"))
    ids = tokenizer.encode("ab a\né")
    assert [tokenizer.decode([token]) for token in ids[1:4]] == ["a", "b", "a"]
    assert tokenizer.decode(ids) == "ab a\né"
    tokenizer.close()
