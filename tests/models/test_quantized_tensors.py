"""Quantized Hugging Face checkpoints against transformers with the values that they stand for."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import Quantization
from nanoserve.errors import UsageError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder, MixtureOfExperts
from nanoserve.models.loading import load_model
from nanoserve.models.packed import PackedExperts, PackedLinear
from nanoserve.models.quantized_tensors import _decode_fp8, _decode_mxfp4
from nanoserve.models.shards import make_shards
from tests.models.test_decoder import random_tokens
from tests.models.test_resharding import assert_goes_to_and_fro
from tests.models.test_shards import ragged_batch, sharded_logits, whole_logits
from tests.models.thread_ranks import ThreadGroup
from tests.oracle.checkpoints import FAMILIES, make_checkpoint
from tests.oracle.packed_checkpoints import write_packed

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "compressed-tensors", {"bits": 4, "group": 32}),
    ("qwen3", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}),
    ("glm4", "compressed-tensors", {"bits": 8, "group": 64}),
    ("qwen2", "compressed-tensors", {"bits": 8, "group": 32, "symmetric": False}),
    ("mistral", "compressed-tensors", {"bits": 3, "group": 32}),
    ("llama", "int8", {}),
    ("mistral", "int8", {"symmetric": False}),
    ("qwen2", "int8", {"symmetric": False, "per_row": False}),
    ("qwen3", "gptq", {"bits": 4, "group": 32}),
    ("llama", "gptq_v2", {"bits": 8, "group": 64}),
    ("qwen2", "gptq", {"bits": 4, "group": 32, "act_order": True}),
    ("mistral", "awq", {"bits": 4, "group": 64}),
    ("qwen3", "fp8", {}),
    ("glm4", "mxfp4", {}),
    ("qwen3_moe", "mxfp4", {}),
    ("gpt_oss", "mxfp4", {}),
    ("qwen3_moe", "gptq", {"bits": 4, "group": 32}),
    ("qwen3_moe", "gptq", {"bits": 4, "group": 32, "act_order": True}),
    ("qwen3_moe", "awq", {"bits": 4, "group": 32}),
    ("qwen3_moe", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}),
    ("qwen3_moe", "fp8", {}),
]


@pytest.mark.parametrize(("family", "method", "settings"), CASES)
def test_logits_are_those_of_transformers(
    family: str, method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = write_random(family, tmp_path, method, **settings)
    decoder = assert_same_logits(model, tmp_path)
    if decoder.config.moe is not None:
        # experts have orders of their own
        is_packed = method != "fp8" and "act_order" not in settings
        assert isinstance(
            decoder.layers[0].feed_forward, PackedExperts if is_packed else MixtureOfExperts
        )


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("qwen3_next", "gptq", {"bits": 4, "group": 32}),
        ("qwen3_next", "awq", {"bits": 4, "group": 32}),
        ("qwen3_5_moe_text", "compressed-tensors", {"bits": 8, "group": 32}),
        ("qwen3_5_moe_text", "fp8", {}),
    ],
)
def test_matrices_whose_rows_are_for_several_parameters(
    family: str, method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Queries and gates of attention are stored in turn, and what a key head of linear attention
    needs lies together. Matrices of few rows are left as they are."""
    modules = "(q|k|v|o|qkvz|out|gate|up|down)_proj|in_proj_(qkv|z)"
    model = write_random(family, tmp_path, method, modules=modules, **settings)
    decoder = assert_same_logits(model, tmp_path)
    is_packed = [isinstance(layer.output, PackedLinear) for layer in decoder.layers]
    assert is_packed == [method != "fp8"] * decoder.config.num_layers


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("jamba", "gptq", {"bits": 4, "group": 32}),
        ("jamba", "fp8", {}),
        ("granitemoehybrid-dense", "compressed-tensors", {"bits": 4, "group": 32}),
        ("granitemoehybrid-dense", "awq", {"bits": 4, "group": 32}),
    ],
)
def test_the_large_matrices_of_mamba(
    family: str, method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Those that make steps, keys and queries are small, and left as they are."""
    modules = "(q|k|v|o|gate|up|down|in|out)_proj|shared_mlp.*_linear"
    model = write_random(family, tmp_path, method, modules=modules, **settings)
    decoder = assert_same_logits(model, tmp_path)
    is_packed = [isinstance(layer.output, PackedLinear) for layer in decoder.layers]
    assert is_packed == [method != "fp8"] * decoder.config.num_layers


@pytest.mark.parametrize("is_old", [True, False])
def test_files_of_autogptq(tmp_path: Path, *, is_old: bool) -> None:
    """They have settings and a name of their own, and a bias of zeros for every matrix."""
    model = write_random("llama", tmp_path, "gptq", bits=4, group=32)
    as_autogptq_writes(tmp_path, is_old=is_old)
    assert_same_logits(model, tmp_path)


def as_autogptq_writes(directory: Path, *, is_old: bool) -> None:
    """Rewrite a GPTQ checkpoint as AutoGPTQ saves it (`save_quantized`): `to_dict` of
    BaseQuantizeConfig in 0.7, and before 0.6, when it named neither method nor format."""
    tensors = load_file(directory / "model.safetensors")
    for name, scales in list(tensors.items()):
        if name.endswith(".scales"):
            tensors[name.replace(".scales", ".bias")] = torch.zeros(
                scales.shape[1], dtype=torch.float16
            )
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "gptq_model-4bit-32g.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True}
    if not is_old:
        settings |= {
            "static_groups": False,
            "model_name_or_path": None,
            "model_file_base_name": None,
        }
        settings |= {"quant_method": "gptq", "checkpoint_format": "gptq"}
    (directory / "quantize_config.json").write_text(json.dumps(settings))


def test_settings_of_autoawq_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    model = write_random("mistral", tmp_path, "awq", bits=4, group=64)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(settings))
    assert_same_logits(model, tmp_path)


CACHE_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}
ATTENTION_GROUP = {
    "targets": ["LlamaAttention"],
    "weights": None,
    "input_activations": CACHE_SCHEME,
}
CACHE_SCALES = [
    ("k_scale", "v_scale"),  # compressed-tensors
    # the same, for all of attention
    ("q_scale", "q_zero_point", "k_scale", "k_zero_point", "v_scale", "v_zero_point"),
    ("kv_scale",),  # AutoFP8
    ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
    # Quark
    ("q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale", "prob_output_scale"),
]


@pytest.mark.parametrize("names", CACHE_SCALES)
@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_scales_for_a_cache_in_8_bits_change_nothing(
    method: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """The cache has more bits here. Names and settings are those that compressed-tensors 0.20
    writes."""
    model = write_random("llama", tmp_path, method)
    add_cache_scales(tmp_path, names)
    config = json.loads((tmp_path / "config.json").read_text())
    section = config["quantization_config"]
    if method == "int8":
        section["kv_cache_scheme"] = CACHE_SCHEME
        section["config_groups"] = {
            "group_0": ATTENTION_GROUP,
            "group_1": section["config_groups"]["group_0"],
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same_logits(model, tmp_path)


def test_a_model_of_which_only_the_cache_was_quantized_is_plain(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    add_cache_scales(tmp_path, CACHE_SCALES[0])
    config = json.loads((tmp_path / "config.json").read_text())
    section = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
    config["quantization_config"] = section | {"kv_cache_scheme": CACHE_SCHEME}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert assert_same_logits(model, tmp_path).config.quantization is None


def add_cache_scales(directory: Path, names: tuple[str, ...]) -> None:
    tensors = load_file(directory / "model.safetensors")
    prefixes = {
        name.split("self_attn.")[0] + "self_attn." for name in tensors if "self_attn." in name
    }
    tensors |= {prefix + name: torch.tensor([0.037]) for prefix in prefixes for name in names}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def write_random(
    family: str, directory: Path, method: str, *, inner: int = 128, **settings: Any
) -> transformers.PreTrainedModel:
    """A random model with the values that its checkpoint has; experts are half as wide as
    `inner`."""
    torch.manual_seed(3)
    config = FAMILIES[family]()
    config.intermediate_size, config.mlp_only_layers = inner, []
    if config.model_type == "qwen3_moe":
        config.moe_intermediate_size, config.num_hidden_layers = inner // 2, 2
    if config.model_type.startswith(("qwen3_next", "qwen3_5")):
        config.moe_intermediate_size = config.shared_expert_intermediate_size = inner // 2
        config.linear_value_head_dim = 32
    if config.model_type in ("jamba", "granitemoehybrid"):
        config.hidden_size, config.shared_intermediate_size, config.mamba_d_head = 64, inner, 16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    write_packed(model, directory, method, **settings)
    return model


def assert_same_logits(model: transformers.PreTrainedModel, directory: Path) -> Decoder:
    decoder, found = load_model(directory, "float32")
    tokens = random_tokens(found, 40)
    with torch.inference_mode():
        hidden = decoder(tokens, torch.arange(40), DenseCausalAttention(found, batch=1, length=40))
        logits, wanted = decoder.compute_logits(hidden), model(tokens[None]).logits[0]
    torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)
    return decoder


@pytest.mark.parametrize(
    ("family", "method", "settings", "layout"),
    [
        ("llama", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}, (1, 2)),
        ("qwen2", "compressed-tensors", {"bits": 3, "group": 16, "symmetric": False}, (2, 2)),
        ("llama", "int8", {}, (2, 1)),
        ("qwen3", "awq", {"bits": 4, "group": 32}, (1, 2)),
        ("llama", "gptq_v2", {"bits": 8, "group": 32}, (1, 2)),
        ("llama", "gptq", {"bits": 4, "group": 32, "act_order": True}, (2, 1)),
        (
            "llama",
            "gptq",
            {"bits": 4, "group": 32, "act_order": True, "modules": "[qkv]_proj|gate|up"},
            (1, 2),
        ),
        ("mistral", "fp8", {}, (1, 2)),
        ("qwen3_moe", "mxfp4", {}, (1, 2)),
        ("gpt_oss", "mxfp4", {}, (1, 2)),
        ("qwen3_moe", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}, (1, 2)),
    ],
)
def test_shards_compute_what_the_whole_model_does(
    family: str, method: str, settings: dict[str, Any], layout: tuple[int, int], tmp_path: Path
) -> None:
    write_random(family, tmp_path, method, **settings)
    config = ModelConfig.from_directory(tmp_path)
    shards = make_shards(config, pipeline_parallel=layout[0], tensor_parallel=layout[1])
    _, wanted = whole_logits(tmp_path, *ragged_batch(config))
    _, logits = sharded_logits(tmp_path, shards, *ragged_batch(config))
    torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("method", "settings", "line"),
    [
        (
            "gptq",
            {"bits": 4, "group": 32, "act_order": True},
            "--tp 2 would cut {}, whose columns have an order of their",
        ),
        (
            "awq",
            {"bits": 4, "group": 64},
            "--tp 2 would cut groups of 64 columns in {}, which has 64; choose a smaller",
        ),
        (
            "int8",
            {},
            "--tp 2 would cut groups of 64 columns in {}, which has 64; choose a smaller degree",
        ),
    ],
)
def test_ranks_may_not_cut_a_group(
    method: str, settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    write_random("llama", tmp_path, method, **settings)
    shard = make_shards(
        ModelConfig.from_directory(tmp_path), pipeline_parallel=1, tensor_parallel=2
    )[0]
    with pytest.raises(UsageError, match=line.format(r"model.layers.0.self_attn.o_proj.weight")):
        load_model(tmp_path, "float32", shard=shard, group=ThreadGroup.alone())


@pytest.mark.parametrize(
    ("family", "method", "settings"),
    [
        ("llama", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}),
        (
            "llama",
            "gptq",
            {"bits": 4, "group": 32, "act_order": True, "modules": "[qkv]_proj|gate|up"},
        ),
        ("qwen3_moe", "mxfp4", {}),
        ("qwen3", "fp8", {}),
    ],
)
def test_weights_that_change_their_layout(
    family: str, method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    write_random(family, tmp_path, method, **settings)
    assert_goes_to_and_fro(tmp_path, [((2, 1), (1, 2))])


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "fp8", "mxfp4"])
@pytest.mark.parametrize(
    "ignored", [["re:.*down_proj$", "model.layers.1.self_attn.k_proj"], []], ids=["listed", "not"]
)
def test_modules_that_are_left_alone_stay_plain(
    method: str, ignored: list[str], tmp_path: Path
) -> None:
    """Modules are plain if plain weights are stored, whether they are listed or not; so is an
    output matrix that is quantized. Rows beside plain ones are plain too."""
    settings = {} if method in ("fp8", "mxfp4") else {"bits": 4, "group": 32}
    pattern = r"lm_head|layers\.0\.self_attn.*proj|layers\.1\.self_attn\.[qvo]_proj|(gate|up)_proj"
    model = write_random("llama", tmp_path, method, modules=pattern, **settings)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"ignore": ignored, "modules_to_not_convert": ignored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    decoder = assert_same_logits(model, tmp_path)
    first, second = decoder.layers[0], decoder.layers[1]
    plain = [second.qkv, first.feed_forward.down, second.feed_forward.down]
    packed = [first.qkv, first.output, second.output, first.feed_forward.gate_up, decoder.lm_head]
    assert not any(isinstance(layer, PackedLinear) for layer in plain)
    assert all(isinstance(layer, PackedLinear) is (method != "fp8") for layer in packed)


def test_any_numbers_of_mxfp4_are_those_of_gguf(tmp_path: Path) -> None:
    """All codes and all exponents whose numbers float32 has, as the gguf library reads them."""
    exponents, codes = (
        torch.arange(250, dtype=torch.uint8)[:, None, None],
        torch.arange(16, dtype=torch.uint8),
    )
    numbers = torch.cat((codes, codes.flip(0))).expand(250, 1, 32)
    blocks = torch.cat((exponents, numbers[:, :, :16] | numbers[:, :, 16:] << 4), dim=2).flatten(1)
    wanted = torch.from_numpy(
        gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.MXFP4)
    )
    stored = {
        "w_blocks": numbers[:, :, ::2] | numbers[:, :, 1::2] << 4,
        "w_scales": exponents[:, :, 0],
    }
    found = _decode_mxfp4("w", None, 0, stored.__getitem__, slice(0, 250))
    assert torch.equal(found.dequantize(), wanted)


def test_edges_of_blocks_and_scales_of_whole_matrices() -> None:
    """Blocks of 16 x 32 of a matrix that they do not divide; one scale for all, with and without an
    axis."""
    stored = torch.randn(40, 72).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3)
    each = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)[:40, :72]
    cases = [("weight_scale_inv", 32, 16, scales, each)]
    cases += [
        ("weight_scale", -1, 1, torch.full(shape, 0.5), torch.tensor(0.5)) for shape in ((), (1,))
    ]
    cases += [("weight_scale", -1, 1, scales[:1].expand(40, 3)[:, :1], scales[0, 0])]
    for suffix, group, rows, numbers, factors in cases:
        tensors = {"w.weight": Stored(stored), f"w.{suffix}": Stored(numbers)}
        quantization = Quantization("fp8", 8, group, rows)
        found = _decode_fp8("w", quantization, tensors.get, slice(16, 40))
        assert torch.equal(found, (stored.float() * factors)[16:])


class Stored:
    """A tensor with the interface of a slice of safetensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, taken: Any) -> torch.Tensor:
        return self.tensor[taken]
