"""Which matrices of a quantized model take which bits, by its config.json alone."""

from dataclasses import replace
from typing import Any

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.config.quantization import Quantization
from nanoserve.costs.counts import ModelCounts
from nanoserve.costs.weight_bits import matrix_bits
from nanoserve.errors import UsageError
from tests.costs.conftest import tiny_experts, tiny_model

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def compressed(**settings: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    } | settings


def bits_of(config: dict[str, Any], layer: int | None, **changes: Any) -> dict[str, Any]:
    model = replace(load_shape("llama-3.1-8b"), **changes)
    return matrix_bits(
        replace(model, quantization=Quantization.from_hf(config, "config.json")), layer
    )


@pytest.mark.parametrize(
    ("ignored", "layer", "floats"),
    [
        (["lm_head"], None, {"embedding", "head"}),
        ([], None, {"embedding"}),
        (["lm_head"], 1, set()),
        (["model.layers.1"], 1, {"qkv", "output", "gate_up", "down"}),
        (["model.layers.1"], 10, set()),
        (["model.layers.*.self_attn", "lm_head"], 3, {"qkv", "output"}),
        (["re:.*down_proj$"], 0, {"down"}),
        (["up_proj"], 0, {"gate_up"}),  # blocks are packed together, or none is
        (["re:("], 0, set()),
        ("lm_head", None, {"embedding"}),
    ],
)
def test_modules_that_are_left_alone_are_numbers(
    ignored: Any, layer: int | None, floats: set[str]
) -> None:
    found = bits_of(compressed(ignore=ignored), layer)
    assert {name for name, bits in found.items() if bits == (None,)} == floats
    assert {bits for name, bits in found.items() if name not in floats} <= {
        (4.5,),
        (4.5, 4.5),
        (4.5, 4.5, 4.5),
    }


def test_zero_points_and_kept_matrices_of_a_method() -> None:
    assert bits_of(GPTQ, 0)["down"] == (4 + 24 / 128,)
    assert bits_of(GPTQ, None) == {"embedding": (None,), "head": (None,)}
    whole_rows = GPTQ | {"group_size": -1}
    assert bits_of(whole_rows, 0)["output"] == (4 + 24 / 4096,)
    floats = {"quant_method": "fp8"}
    assert set(bits_of(floats, 0).values()) == {(None,)}


def test_rounded_weights_are_refused_for_a_quantized_model_and_where_groups_do_not_divide() -> None:
    model = tiny_experts(hidden_size=64)
    assert matrix_bits(model.rounded("int4"), 1) == {
        "qkv": (4.5, 4.5, 4.5),
        "output": (None,),  # 8 columns
        "router": (None,),
        "expert_gate_up": (4.5, 4.5),
        "expert_down": (None,),
    }
    assert matrix_bits(model.rounded("int8"), None) == {"embedding": (8.5,), "head": (8.5,)}
    assert matrix_bits(model, 1) == matrix_bits(model, None) == {}
    with pytest.raises(
        UsageError, match="--quantization int4: the model is quantized already; leave it out"
    ):
        model.rounded("int8").rounded("int4")


def test_layers_of_unlike_formats_are_counted_apart() -> None:
    kinds = {f"blk.{layer}.ffn_down": kind for layer, kind in enumerate(["Q4_K", "Q6_K"])}
    config = {"quant_method": "gguf", "tensor_types": kinds}
    quantization = Quantization.from_hf(config, "config.json")
    model = tiny_model(intermediate_size=256, quantization=quantization, tensor_names="gguf")
    plain = ModelCounts(replace(model, quantization=None)).stage_weight_bytes(0)
    rows = 16  # of 8 rows, padded
    packed = 256 * rows * (4.625 + 6.5625) / 8
    assert ModelCounts(model).stage_weight_bytes(0) == plain - 2 * 2 * 256 * 8 + packed


@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-31b"])
def test_a_layer_without_all_of_queries_keys_and_values_has_blocks_for_those_it_has(
    name: str,
) -> None:
    """Layers that share keys and values have queries alone; layers whose values are keys have two
    blocks."""
    model = replace(load_shape(name), quantization=Quantization.rounding("int4", on_gpu=False))
    sizes = [len(model.of_layer(layer).qkv_sizes) for layer in range(model.num_layers)]
    assert len({*sizes}) == 2
    assert [len(matrix_bits(model, layer)["qkv"]) for layer in range(model.num_layers)] == sizes
    assert (
        ModelCounts(model).stage_weight_bytes(0)
        < ModelCounts(load_shape(name)).stage_weight_bytes(0) / 2
    )
