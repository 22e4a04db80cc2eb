"""The cost model's bytes of weights against the parameters of decoders that are really loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import BLOCK_TYPES
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.weight_bits import ROWS
from nanoserve.lab.benchmarks.floors import ModelCost
from nanoserve.layout import ParallelLayout
from nanoserve.models.decoder import Decoder
from nanoserve.models.gguf_blocks import decode_blocks
from nanoserve.models.hub import find_shape
from nanoserve.models.loading import load_model
from nanoserve.models.packed import num_weights
from nanoserve.models.shards import make_shards
from nanoserve.scheduler.work import StepWork
from tests.models.test_gguf import make_model
from tests.models.test_shards import write_checkpoint
from tests.models.thread_ranks import ThreadGroup
from tests.oracle import gguf_files
from tests.oracle.checkpoints import FAMILIES
from tests.oracle.packed_checkpoints import write_packed
from triton_ops import packed

DELTA_NET_MODULES = "(q|k|v|o|qkvz|out|gate|up|down)_proj|in_proj_(qkv|z)"
"""Matrices that are quantized beside Gated DeltaNet: rates have too few rows."""


def matrix_bytes(decoder: Decoder) -> int:
    """Bytes of all matrices: numbers, or packed integers without an order of columns. Vectors do
    not count, nor do the biases of all experts, nor the decays of Mamba."""
    left_out = ("_bias", "log_decay")
    return sum(
        parameter.nbytes
        for name, parameter in decoder.named_parameters()
        if parameter.dtype == torch.uint8
        or (parameter.is_floating_point() and parameter.dim() > 1 and not name.endswith(left_out))
    )


def check_bytes(
    directory: Path, layout: tuple[int, int] = (1, 1), quantization: str | None = None
) -> None:
    """Every shard of the model in a directory holds as many bytes as are counted."""
    pipeline, tensor = layout
    config = find_shape(str(directory), quantization)
    shards = make_shards(config, pipeline_parallel=pipeline, tensor_parallel=tensor)
    counts = ModelCounts(
        config, ParallelLayout(pipeline_parallel=pipeline, tensor_parallel=tensor), Precision.of(32)
    )
    for shard in shards:
        decoder, loaded = load_model(
            directory, "float32", shard=shard, group=ThreadGroup.alone(), quantization=quantization
        )
        assert loaded == config
        assert counts.stage_weight_bytes(shard.stage) == matrix_bytes(decoder)


@pytest.mark.parametrize("quantization", ["int8", "int4:32"])
def test_only_inputs_and_outputs_of_mamba_are_rounded(quantization: str, tmp_path: Path) -> None:
    """Its decays have 32 columns here, which a group could divide; steps, keys and queries are made
    by matrices of few rows."""
    write_checkpoint("mamba", tmp_path, hidden_size=64, intermediate_size=128, state_size=32)
    decoder, _ = load_model(tmp_path, "bfloat16", quantization=quantization)
    kinds = {
        name.removeprefix("layers.0."): parameter.dtype
        for name, parameter in decoder.layers[0].named_parameters(prefix="layers.0")
        if parameter.dim() > 1
    }
    rounded = {name.partition(".weight")[0] for name, kind in kinds.items() if kind == torch.uint8}
    assert rounded == {"mixer.inputs", "output"}
    plain = {name: kind for name, kind in kinds.items() if kind != torch.uint8}
    assert plain == {
        "mixer.kernel": torch.bfloat16,
        "mixer.selection.weight": torch.bfloat16,
        "mixer.time_step.weight": torch.bfloat16,
        "mixer.log_decay": torch.float32,
    }


def test_a_step_of_the_benchmarks_floor_reads_what_is_loaded(tmp_path: Path) -> None:
    """A token reads every matrix once and a row of the embedding, which is the head, and its keys
    and values; that is what ``nanoserve analyze`` counts too."""
    write_model("llama-tied-biased", tmp_path, None)
    decoder, config = load_model(tmp_path, "bfloat16", quantization="int8")
    row = config.hidden_size * 8.5 / 8 * 112 / 100  # with its share of the vocabulary's padding
    work = StepWork.of([10])
    read = ModelCost(config, 2).step_bytes(work)
    assert read == matrix_bytes(decoder) + row + 10 * ModelCounts(config).kv_bytes_per_token(0)
    operators = ModelCounts(config).operators(work, 0)
    assert read == sum(one.weight_bytes + one.kv_bytes for one in operators)


@pytest.mark.parametrize("family", ["llama-tied-biased", "mixtral", "glm4"])
def test_weights_are_counted_as_in_transformers_whether_packed_or_not(
    family: str, tmp_path: Path
) -> None:
    write_model(family, tmp_path, None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for quantization in (None, "int4"):
        decoder, _ = load_model(tmp_path, "bfloat16", quantization=quantization)
        assert num_weights(decoder) == model.num_parameters()


def write_model(family: str, directory: Path, method: str | None, **settings: Any) -> None:
    config = FAMILIES[family]()
    config.intermediate_size, config.vocab_size = 128, 100
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = 64
    if config.model_type.startswith("lfm2"):
        config.hidden_size, config.block_auto_adjust_ff_dim = 64, False
    if config.model_type.startswith("qwen3_"):
        config.head_dim, config.shared_expert_intermediate_size = 32, 64
        config.linear_num_key_heads, config.linear_num_value_heads = 2, 4
        config.linear_key_head_dim = config.linear_value_head_dim = 32
    if config.model_type.startswith("mamba"):
        config.hidden_size, config.num_heads, config.head_dim = 64, 8, 16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if method is None:
        model.save_pretrained(directory)
    else:
        write_packed(model, directory, method, **settings)


@pytest.mark.parametrize(
    ("family", "quantization", "layout"),
    [
        ("qwen3", "int4", (2, 2)),
        ("llama-tied-biased", "int4", (1, 1)),
        ("llama-tied-biased", "int8", (2, 1)),
        ("glm4", "int8", (1, 2)),
        ("mixtral", "int4", (1, 1)),
        ("qwen3_moe", "int8", (2, 2)),
        ("qwen3_moe", None, (1, 2)),
        ("gpt_oss", "int4", (1, 1)),
        ("gpt_oss", None, (2, 2)),
        ("gemma3_text", "int8", (2, 1)),
        ("gemma4_text-moe", "int8", (2, 1)),
        ("gemma4_text-moe", "int4", (1, 2)),
        ("cohere2", None, (1, 2)),
        ("lfm2", "int4", (1, 1)),
        ("lfm2_moe", "int8", (2, 1)),
        ("qwen3_5_text", "int4", (2, 2)),
        ("qwen3_5_moe_text", "int8", (1, 2)),
        ("qwen3_next", "int4", (1, 2)),
        ("qwen3_next", None, (2, 1)),
        ("jamba", None, (2, 1)),
        ("jamba", "int4", (1, 2)),
        ("granitemoehybrid", "int8", (1, 2)),
        ("granitemoehybrid-dense", "int4", (2, 1)),
        ("granite", "int4", (1, 2)),
        ("mamba", "int8", (1, 1)),
        ("mamba", None, (2, 2)),
        ("mamba2", "int4", (1, 2)),
        ("mamba2-single-group", "int8", (2, 2)),
    ],
)
def test_rounded_weights(
    family: str, quantization: str | None, layout: tuple[int, int], tmp_path: Path
) -> None:
    write_model(family, tmp_path, None)
    check_bytes(tmp_path, layout, quantization)


def test_ranks_have_as_much_memory_where_their_parts_are_unequal(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path, intermediate_size=160, moe_intermediate_size=96)
    check_bytes(tmp_path, (1, 2), "int4")


@pytest.mark.parametrize(
    ("family", "method", "settings", "layout"),
    [
        ("llama", "compressed-tensors", {"bits": 4, "group": 32}, (1, 1)),
        ("qwen3", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}, (2, 1)),
        ("mistral", "compressed-tensors", {"bits": 3, "group": 32}, (1, 2)),
        ("gpt_oss", "mxfp4", {}, (1, 2)),
        ("llama", "int8", {}, (1, 1)),
        ("qwen3", "gptq", {"bits": 4, "group": 32}, (1, 1)),
        ("qwen2", "gptq", {"bits": 8, "group": 64, "act_order": True}, (1, 1)),
        ("mistral", "awq", {"bits": 4, "group": 64}, (2, 1)),
        ("qwen3", "fp8", {}, (1, 1)),
        ("glm4", "mxfp4", {}, (1, 1)),
        ("lfm2", "gptq", {"bits": 4, "group": 32, "modules": "proj|w[123]"}, (1, 1)),
        ("qwen3_5_text", "gptq", {"bits": 4, "group": 32, "modules": DELTA_NET_MODULES}, (2, 1)),
        ("qwen3_next", "awq", {"bits": 4, "group": 32, "modules": DELTA_NET_MODULES}, (1, 2)),
    ],
)
def test_quantized_checkpoints(
    family: str, method: str, settings: dict[str, Any], layout: tuple[int, int], tmp_path: Path
) -> None:
    write_model(family, tmp_path, method, **settings)
    check_bytes(tmp_path, layout)


@pytest.mark.parametrize(
    ("family", "block_type", "layout"),
    [
        ("qwen3", "Q4_1", (1, 2)),
        ("glm4", "Q6_K", (2, 1)),
        ("mixtral", "Q8_0", (1, 1)),
        ("qwen3_moe", "BF16", (1, 1)),
        ("lfm2", "Q8_0", (2, 1)),
        ("lfm2_moe", "Q4_1", (1, 1)),
        ("jamba", "Q8_0", (1, 1)),
        ("granitemoehybrid", "Q4_1", (2, 1)),
        ("mamba2", "Q8_0", (2, 1)),
    ],
)
def test_gguf_files(family: str, block_type: str, layout: tuple[int, int], tmp_path: Path) -> None:
    _, directory = make_model(family, block_type, tmp_path)
    check_bytes(directory, layout)
    shape = find_shape(str(tmp_path / "model.gguf"), None)
    assert shape.quantization == ModelConfig.from_directory(directory).quantization
    assert (shape.quantization is None) is (block_type == "BF16")


def test_a_gguf_file_of_several_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats as llama.cpp's Q4_K_M mixes them: values and one layer's last matrix in Q6_K, another's not
    quantized."""
    add, types = (
        gguf_files._add_parameter,
        {"0.self_attn.v_proj": "Q6_K", "0.mlp.down_proj": "Q6_K"},
    )
    types |= {"1.self_attn.k_proj": "F16", "lm_head": "Q6_K"}

    def add_one(writer: Any, name: str, parameter: Any, config: Any, block_type: str) -> None:
        own = next(
            (own for ending, own in types.items() if name.endswith(f"{ending}.weight")), block_type
        )
        add(writer, name, parameter, config, own)

    monkeypatch.setattr(gguf_files, "_add_parameter", add_one)
    _, directory = make_model("qwen3", "Q4_K", tmp_path)
    check_bytes(directory)
    check_bytes(directory, (2, 1))


def test_bits_of_gguf_types_are_those_that_are_packed() -> None:
    for block_type in BLOCK_TYPES.values():
        if block_type.size > 1:
            form = decode_blocks(
                torch.zeros(1, block_type.num_bytes, dtype=torch.uint8), block_type
            ).format
            assert (
                block_type.loaded_bits
                == 8 * form.row_bytes(block_type.size) / packed.ROWS / block_type.size
            )
    assert packed.ROWS == ROWS
