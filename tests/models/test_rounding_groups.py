"""Groups of `--quantization`: chosen by the device, or named by the user and refused where they do not divide."""

import pytest
import torch

from nanoserve.config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.packed import rounded_forms
from nanoserve.models.shards import make_shards
from nanoserve.models.weights import shard_parts, tensor_parts
from nanoserve.quantization import Rounding

CPU, GPU = torch.device("cpu"), torch.device("cuda")
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(("text", "wanted"), [("int4", (4, None)), ("int8", (8, None)), ("int4:64", (4, 64))])
def test_a_group_may_be_named(text: str, wanted: tuple[int, int | None]) -> None:
    found = Rounding.parse(text)
    assert (found.bits, found.group) == wanted


@pytest.mark.parametrize("text", ["int3", "int4:", "int4:0", "int8:48", "int4:-32", "int4:9999999", "int4:64:32", ""])
def test_what_is_no_rounding_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^quantization .*") as caught:
        Rounding.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("inner", "group"), [(1024, 128), (192, 64), (96, 32), (80, None)])
def test_a_gpu_takes_the_largest_group_that_divides(inner: int, group: int | None) -> None:
    parts = list(tensor_parts(config(inner)))
    on_gpu, on_cpu = rounded_forms(parts, "int4", GPU), rounded_forms(parts, "int4", CPU)
    assert (on_gpu[DOWN].group if DOWN in on_gpu else None) == group
    assert (on_cpu[DOWN].group if DOWN in on_cpu else None) == (group and 32)
    assert on_gpu["model.embed_tokens.weight"][:2] == (8, 128)


def test_no_rank_gets_a_part_of_a_group() -> None:
    found = []
    for shard in make_shards(config(384), pipeline_parallel=1, tensor_parallel=2):
        parts = shard_parts(tensor_parts(config(384)), config(384), shard)
        found.append(rounded_forms(parts, "int8", GPU)[DOWN].group)
    assert found == [64, 64]


def test_only_a_group_that_the_user_named_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^--quantization int4:64: groups of 64 do not divide the 96 columns of model"
    ):
        rounded_forms(tensor_parts(config(96)), "int4:64", CPU)


def config(inner: int) -> ModelConfig:
    shape = {"hidden_size": 128, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 2}
    return ModelConfig.from_hf({"model_type": "llama", "vocab_size": 64, **shape}, source="config.json")
