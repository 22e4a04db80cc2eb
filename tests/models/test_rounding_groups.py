"""Groups of `--quantization`: chosen by the device and the whole matrix, never by how many ranks
there are, or named by the user and refused where they do not divide."""

from typing import Any

import pytest

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import Rounding
from nanoserve.errors import UsageError
from nanoserve.models.packed import rounded_forms
from nanoserve.models.shards import make_shards, shard_config
from nanoserve.models.weights import shard_parts, tensor_parts

DOWN, OUTPUT = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("text", "wanted"), [("int4", (4, None)), ("int8", (8, None)), ("int4:64", (4, 64))]
)
def test_a_group_may_be_named(text: str, wanted: tuple[int, int | None]) -> None:
    found = Rounding.parse(text)
    assert (found.bits, found.group) == wanted


@pytest.mark.parametrize(
    "text", ["int3", "int4:", "int4:0", "int8:48", "int4:-32", "int4:9999999", "int4:64:32", ""]
)
def test_what_is_no_rounding_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^quantization .*") as caught:
        Rounding.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("inner", "group"), [(1024, 128), (192, 64), (96, 32), (80, None)])
def test_a_gpu_takes_the_largest_group_that_divides(inner: int, group: int | None) -> None:
    on_gpu, on_cpu = forms(inner, "int4", on_gpu=True), forms(inner, "int4")
    assert on_gpu.get(DOWN) == group
    assert on_cpu.get(DOWN) == (group and 32)
    assert on_gpu["model.embed_tokens.weight"] == 128


@pytest.mark.parametrize(("head_dim", "group"), [(256, 128), (64, 64), (96, 32), (16, 128)])
def test_groups_of_the_output_matrix_divide_a_head_where_they_can(
    head_dim: int, group: int
) -> None:
    """Eight heads have a multiple of 128 columns, whatever their size."""
    assert (
        forms(256, "int8", on_gpu=True, num_attention_heads=8, head_dim=head_dim)[OUTPUT] == group
    )


@pytest.mark.parametrize(
    ("inner", "quantization", "device", "degree", "wanted"),
    [
        (384, "int8", "gpu", 2, [256, 128]),  # three groups of 128
        (96, "int8", "cpu", 2, [64, 32]),
        (224, "int4", "cpu", 4, [64, 64, 64, 32]),
        (192, "int4:64", "cpu", 2, [128, 64]),
        (96, "int4", "cpu", 4, [32, 32, 32, 0]),
        (128, "int4", "cpu", 4, [32, 32, 32, 32]),
        (90, "int4", "cpu", 4, [23, 23, 23, 21]),  # nothing is packed
    ],
)
def test_no_rank_gets_a_part_of_a_group(
    inner: int, quantization: str, device: str, degree: int, wanted: list[int]
) -> None:
    model = config(inner, num_attention_heads=4).rounded(quantization, on_gpu=device == "gpu")
    columns = []
    for shard in make_shards(model, pipeline_parallel=1, tensor_parallel=degree):
        assert shard_config(model, shard).intermediate_size == wanted[0]
        parts = {part.name: part for part in shard_parts(tensor_parts(model), model, shard)}
        columns.append(len(parts[DOWN].columns or ()) if DOWN in parts else 0)
    assert columns == wanted


def test_only_a_group_that_the_user_named_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"^--quantization int4:64: groups of 64 do not divide the 96 columns of model",
    ):
        forms(96, "int4:64")


def forms(inner: int, quantization: str, *, on_gpu: bool = False, **more: Any) -> dict[str, int]:
    """The groups of the matrices that are rounded."""
    model = config(inner, **more).rounded(quantization, on_gpu=on_gpu)
    return {name: form.group for name, form in rounded_forms(tensor_parts(model), model).items()}


def config(inner: int, **more: Any) -> ModelConfig:
    shape = {
        "hidden_size": 128,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    } | more
    return ModelConfig.from_hf(
        {"model_type": "llama", "vocab_size": 64, **shape}, source="config.json"
    )
