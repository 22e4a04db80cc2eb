"""Quantized Hugging Face checkpoints whose tensors or settings are damaged, lie, or are of a method
that is not read: one clear line."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve.config.quantization import Quantization
from nanoserve.errors import ModelError, NanoserveError, UsageError
from nanoserve.models.loading import load_model
from tests.oracle.checkpoints import FAMILIES
from tests.oracle.packed_checkpoints import write_packed

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], object]
"""A change of the tensors of one module, by the ends of their names."""

MODULE = "model.layers.0.self_attn.o_proj"
GROUPS: dict[str, Any] = {"bits": 4, "group": 32}
METHODS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {**GROUPS, "symmetric": False},
    "gptq": {**GROUPS, "act_order": True},
    "awq": GROUPS,
    "int8": {},
    "fp8": {},
    "mxfp4": {},
}


@cache
def checkpoint(method: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the config.json of a sound model."""
    config = FAMILIES["llama"]()
    config.num_hidden_layers, config.intermediate_size, config.vocab_size = 1, 64, 32
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with TemporaryDirectory() as directory:
        write_packed(model, Path(directory), method, **METHODS[method])
        return load_file(f"{directory}/model.safetensors"), json.loads(
            Path(directory, "config.json").read_text()
        )


def write_changed(directory: Path, method: str, change: Change, **section: Any) -> None:
    tensors, config = checkpoint(method)
    own = {
        name.removeprefix(f"{MODULE}."): tensor.clone()
        for name, tensor in tensors.items()
        if MODULE in name
    }
    change(own)
    others = {name: tensor for name, tensor in tensors.items() if MODULE not in name}
    changed = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in own.items()}
    save_file(others | changed, directory / "model.safetensors")
    config = config | {"quantization_config": config["quantization_config"] | section}
    (directory / "config.json").write_text(json.dumps(config))


def test_sound_checkpoints_are_read(tmp_path: Path) -> None:
    for method in METHODS:
        write_changed(tmp_path, method, lambda own: None)
        load_model(tmp_path, "float32")


def put(name: str, place: Any, value: float) -> Change:
    def change(own: Tensors) -> None:
        own[name][place] = value

    return change


def cut(name: str) -> Change:
    return lambda own: own.update({name: own[name][..., :-1]})


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda own: own.update({name: own[name].to(dtype)})


def without(name: str) -> Change:
    return lambda own: own.pop(name)


BAD: list[tuple[str, Change, str]] = [
    ("compressed-tensors", without("weight_scale"), "weight_scale is missing"),
    ("compressed-tensors", without("weight_zero_point"), "weight_zero_point is missing"),
    ("compressed-tensors", without("weight_shape"), "weight_shape is missing"),
    ("compressed-tensors", without("weight_packed"), "weight_packed is missing"),
    (
        "compressed-tensors",
        cut("weight_scale"),
        r"weight_scale is F16 of shape \[64, 1\], not .* of \[64, 2\]",
    ),
    (
        "compressed-tensors",
        cut("weight_zero_point"),
        r"weight_zero_point is I32 of shape \[8, 1\], not I32 of \[8, 2\]",
    ),
    ("compressed-tensors", cast("weight_packed", torch.float32), "weight_packed is F32"),
    (
        "compressed-tensors",
        put("weight_shape", 0, 1 << 60),
        r"weight_shape is \[1152921504606846976, 64\], but",
    ),
    (
        "compressed-tensors",
        put("weight_shape", 1, -64),
        r"weight_shape is \[64, -64\], but config.json says \[64, 64\]",
    ),
    (
        "compressed-tensors",
        put("weight_scale", (3, 1), float("nan")),
        "has scales that are NaN or infinite",
    ),
    ("gptq", without("scales"), "scales is missing"),
    ("gptq", without("qzeros"), "qzeros is missing"),
    ("gptq", without("qweight"), "qweight is missing"),
    ("gptq", put("g_idx", 0, 2), "g_idx does not give each of 2 groups as many columns"),
    ("gptq", put("g_idx", 0, -1), "g_idx does not give each of 2 groups as many columns"),
    (
        "gptq",
        lambda own: own["g_idx"].zero_(),
        "g_idx does not give each of 2 groups as many columns",
    ),
    ("gptq", cut("g_idx"), r"g_idx is I32 of shape \[63\], not I32 or I64 of \[64\]"),
    ("gptq", cast("g_idx", torch.float32), "g_idx is F32"),
    ("gptq", cut("qzeros"), "qzeros is I32 of shape"),
    ("gptq", put("scales", (0, 0), float("inf")), "has scales that are NaN or infinite"),
    (
        "gptq",
        lambda own: own.update(bias=torch.eye(64)[63].half()),
        "bias does not belong to a llama model",
    ),
    ("gptq", lambda own: own.update(bias=torch.zeros(32)), "bias does not belong to a llama model"),
    ("awq", cut("scales"), "scales is F16 of shape"),
    ("awq", cast("qweight", torch.int64), "qweight is I64"),
    (
        "awq",
        lambda own: own.update(g_idx=torch.zeros(64)),
        "g_idx does not belong to a llama model",
    ),
    ("int8", without("weight_scale"), "weight_scale is missing"),
    (
        "int8",
        lambda own: own.update(weight_packed=torch.zeros(2, 2)),
        "weight_packed does not belong to a llama model",
    ),
    ("int8", cut("weight"), r"weight is I8 of shape \[64, 63\], not I8 of \[64, 64\]"),
    ("fp8", without("weight_scale_inv"), "weight_scale_inv is missing"),
    ("fp8", cut("weight_scale_inv"), r"weight_scale_inv is F32 of shape \[1, 0\]"),
    ("fp8", put("weight_scale_inv", 0, float("nan")), "weight has NaN or infinite values"),
    ("mxfp4", without("weight_scales"), "weight_scales is missing"),
    ("mxfp4", without("weight_blocks"), "weight_blocks is missing"),
    (
        "mxfp4",
        cut("weight_blocks"),
        r"weight_blocks is U8 of shape \[64, 2, 15\], not U8 of \[64, 2, 16\]",
    ),
    ("mxfp4", put("weight_scales", (0, 0), 255), "has scales that are NaN or infinite"),
]


@pytest.mark.parametrize(("method", "change", "problem"), BAD)
def test_what_is_wrong_is_one_line(
    method: str, change: Change, problem: str, tmp_path: Path
) -> None:
    write_changed(tmp_path, method, change)
    with pytest.raises(ModelError, match=problem) as caught:
        load_model(tmp_path, "float32")
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/model.safetensors: tensor {MODULE}.") and "\n" not in line


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "fp8"])
def test_a_group_size_that_lies_is_one_line(method: str, tmp_path: Path) -> None:
    section: dict[str, Any] = {"group_size": 64, "weight_block_size": [16, 16]}
    if method == "compressed-tensors":
        section["config_groups"] = {
            "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 64}}
        }
    write_changed(tmp_path, method, lambda own: None, **section)
    with pytest.raises(
        ModelError, match=r"(weight_zero_point|weight_scale_inv|qzeros) is .* not .* of \[.*config"
    ):
        load_model(tmp_path, "float32")


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq"])
def test_a_group_of_zeros_may_have_a_scale_of_zero(method: str, tmp_path: Path) -> None:
    name = "weight_scale" if method == "compressed-tensors" else "scales"
    write_changed(tmp_path, method, lambda own: own[name].zero_())
    decoder, _ = load_model(tmp_path, "float32")
    assert not decoder.layers[0].output(torch.randn(3, 64)).any()


def test_a_group_that_cannot_be_packed_becomes_floats(tmp_path: Path) -> None:
    tensors, config = checkpoint("compressed-tensors")
    weights = {"num_bits": 4, "type": "int", "group_size": 16}
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_scale")}
    zeros = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_zero_point")}
    finer = {name: tensor.repeat_interleave(2, dim=1) for name, tensor in (scales | zeros).items()}
    save_file(tensors | finer, tmp_path / "model.safetensors")
    section = config["quantization_config"] | {"config_groups": {"group_0": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    found, _ = load_model(tmp_path, "float32")
    write_changed(tmp_path, "compressed-tensors", lambda own: None)
    wanted, _ = load_model(tmp_path, "float32")
    rows = torch.randn(3, 64)
    assert isinstance(found.layers[0].output, torch.nn.Linear)
    torch.testing.assert_close(found.layers[0].output(rows), wanted.layers[0].output(rows))


def test_a_quantized_model_is_not_quantized_again(tmp_path: Path) -> None:
    for method in METHODS:
        write_changed(tmp_path, method, lambda own: None)
        with pytest.raises(
            UsageError, match="--quantization int4: the model is quantized already; leave it out"
        ):
            load_model(tmp_path, "float32", quantization="int4")


WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": 32}
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "quantization method None is not read; choose"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "method 'bitsandbytes' is not read; choose one of",
    ),
    (
        {"quant_method": "torchao"},
        "method 'torchao' is not read; .*, or 16 bits and --quantization int4",
    ),
    ({"quant_method": ["gptq"]}, "quantization method .'gptq'. is not read"),
    (
        {"quant_method": "gptq", "bits": 3, "group_size": 32},
        "gptq with 3 bits in groups of 32 is not read",
    ),
    ({"quant_method": "gptq", "bits": 4.0, "group_size": 32}, "gptq with 4.0 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "in groups of 0 is not read"),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        "GPTQ in the format 'marlin' is not read; only gptq and gptq_v2 are",
    ),
    ({"quant_method": "awq", "bits": 4}, "awq with 4 bits in groups of None is not read"),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": 7},
        "AWQ of version 7 is not read; only gemm is",
    ),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "must be two sizes: .128."),
    ({"quant_method": "compressed-tensors"}, "must have one entry of config_groups with weights"),
    (
        {"config_groups": {"a": {"weights": WEIGHTS}}, "format": "marlin-24"},
        "format 'marlin-24' is not read; only pack-",
    ),
    (
        {"config_groups": {"a": {"weights": WEIGHTS | {"num_bits": 2}}}},
        "weights of type 'int' in 2 bits",
    ),
    (
        {"config_groups": {"a": {"weights": WEIGHTS | {"group_size": "x"}}}},
        "and groups of 'x' are not read",
    ),
    (
        {"config_groups": {"a": {"weights": WEIGHTS | {"strategy": "block"}}}},
        "must be two sizes: None",
    ),
]


@pytest.mark.parametrize(("section", "problem"), SETTINGS)
def test_settings_that_are_not_read_are_one_line(section: dict[str, Any], problem: str) -> None:
    method = {"quant_method": "compressed-tensors"} if "config_groups" in section else {}
    with pytest.raises(ModelError, match=f"^config.json: .*{problem}") as caught:
        Quantization.from_hf(method | section, "config.json")
    assert "\n" not in str(caught.value)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-2, 300), st.floats(), st.text(max_size=8))
NESTED = st.one_of(
    VALUES, st.lists(VALUES, max_size=3), st.dictionaries(st.text(max_size=4), VALUES, max_size=2)
)
METHOD_NAMES = st.sampled_from(["gptq", "awq", "fp8", "mxfp4", "compressed-tensors"])
KEYS = [
    "bits",
    "group_size",
    "version",
    "checkpoint_format",
    "weight_block_size",
    "format",
    "config_groups",
    "w_bit",
]
WEIGHT_KEYS = ["num_bits", "type", "group_size", "strategy", "block_structure", "symmetric"]


@settings(max_examples=60)
@given(
    METHOD_NAMES,
    st.dictionaries(st.sampled_from(KEYS), NESTED),
    st.none()
    | st.dictionaries(
        st.sampled_from(WEIGHT_KEYS), NESTED | st.sampled_from(["int", "float", 4, 8, "block"])
    ),
)
def test_any_settings_are_an_error_or_read(
    method: str, section: dict[str, Any], weights: dict[str, Any] | None
) -> None:
    groups = {} if weights is None else {"config_groups": {"group_0": {"weights": weights}}}
    try:
        Quantization.from_hf({"quant_method": method} | section | groups, "config.json")
    except ModelError as error:
        assert "\n" not in str(error)


DTYPES = [
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float32,
]
SUFFIXES = {
    "compressed-tensors": [
        "weight_packed",
        "weight",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
    ],
    "gptq": ["qweight", "qzeros", "scales", "g_idx"],
    "awq": ["qweight", "qzeros", "scales"],
    "int8": ["weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_packed"],
    "fp8": ["weight", "weight_scale_inv", "weight_scale"],
    "mxfp4": ["weight_blocks", "weight_scales"],
}
TENSORS = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from([0, 1, 2, 8, 16, 32, 64]), max_size=4).filter(
        lambda shape: torch.Size(shape).numel() < 9000
    ),
    st.integers(0, 255),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), method=st.sampled_from(list(SUFFIXES)))
def test_any_tensors_are_an_error_or_a_model(data: Any, method: str, tmp_path: Path) -> None:
    """Some tensors of a module are taken away, some are replaced by others of any shape and
    dtype."""
    changes = data.draw(
        st.dictionaries(st.sampled_from(SUFFIXES[method]), st.none() | TENSORS, max_size=3)
    )

    def change(own: Tensors) -> None:
        for name, tensor in changes.items():
            own.pop(name, None)
            if tensor is not None:
                dtype, shape, value = tensor
                own[name] = torch.full(shape, value % 127).to(dtype)

    write_changed(tmp_path, method, change)
    try:
        load_model(tmp_path, "float32")
    except NanoserveError as error:
        assert "\n" not in str(error)
