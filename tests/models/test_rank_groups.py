"""Tensor-parallel ranks have slices of the whole quantized matrix, whatever width they have to
divide."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.decoder import Decoder
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.loading import load_model
from nanoserve.models.packed import PackedMatrix
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import Shard, make_shards, whole_model
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.models.weights import shard_parts, tensor_parts
from tests.models.test_gguf import make_model
from tests.models.test_quantized_tensors import write_random
from tests.models.test_shards import ragged_batch, sharded_logits, whole_logits, write_checkpoint
from tests.models.thread_ranks import ThreadGroup
from triton_ops.packed import unpack

NUMBERS = ("_bias", "router.weight", "rates.weight", "shared.gate.weight")
"""Ends of the names of parameters that are not rounded."""


def matrices(decoder: Decoder) -> dict[str, tuple[Tensor, bool]]:
    """The numbers of every matrix by the name of its parameter, and whether it is packed."""
    found = {
        name: (one, False) for name, one in decoder.named_parameters() if one.is_floating_point()
    }
    for name, matrix in decoder.named_modules():
        if not isinstance(matrix, PackedMatrix):
            continue
        experts = []
        for expert in range(max(1, matrix.shape.experts)):
            segments = [
                unpack(
                    packed[expert] if matrix.shape.experts else packed, segment.rows, segment.format
                ).dequantize()
                for segment, packed in zip(matrix.shape.segments, matrix.packed, strict=True)
            ]
            experts.append(torch.cat(segments))
        found[name] = (torch.stack(experts) if matrix.shape.experts else experts[0]), True
    return found


def slices(
    decoder: Decoder, config: ModelConfig, shard: Shard
) -> Iterator[tuple[TensorPart, Tensor, bool]]:
    """Every matrix of the checkpoint of which the shard has a part, with its numbers and whether it
    is packed. What no tensor fills is zero."""
    found = matrices(decoder)
    left = {name: numbers.clone() for name, (numbers, _) in found.items()}
    for part in shard_parts(tensor_parts(config), config, shard):
        if len(part.shape) == 2 and not part.parameter.endswith(NUMBERS):
            numbers, is_packed = found[part.parameter]
            yield part, part.region(numbers), is_packed
        part.region(left[part.parameter]).zero_()
    assert not any(numbers.any() for numbers in left.values())


def expected_values(weight: Tensor, bits: int, group: int) -> Tensor:
    """Follow docs/quantization.md: the nearest of the codes, with a float16 scale for each group. 4
    bits give the number of the largest size the code -8."""
    groups = weight.float().view(len(weight), -1, group)
    places = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, places)
    scales = (largest.abs() / 127 if bits == 8 else largest / -8).half().float()
    low, high = (-127, 127) if bits == 8 else (-8, 7)
    return ((groups / scales).round().clamp(low, high) * scales).view_as(weight)


@pytest.mark.parametrize(
    ("family", "quantization", "sizes", "degree"),
    [
        ("llama", "int4", {"intermediate_size": 96}, 2),
        ("llama", "int8", {"intermediate_size": 160}, 2),
        ("glm4", "int8:64", {"intermediate_size": 192, "head_dim": 32}, 2),
        ("qwen3", "int4", {"intermediate_size": 96}, 4),  # one rank has none of it
        ("qwen3_moe", "int8", {"intermediate_size": 128, "moe_intermediate_size": 96}, 2),
        (
            "qwen3_moe",
            "int4",
            {"intermediate_size": 224, "moe_intermediate_size": 224, "head_dim": 32},
            4,
        ),
        (
            "qwen3_next",
            "int8",
            {
                "intermediate_size": 128,
                "moe_intermediate_size": 96,
                "shared_expert_intermediate_size": 64,
                "head_dim": 32,
                "linear_value_head_dim": 32,
            },
            2,
        ),
        ("qwen3_5_text", "int4", {"head_dim": 32, "linear_value_head_dim": 32}, 4),
        ("gpt_oss", "int4", {"intermediate_size": 96, "head_dim": 32}, 2),
        ("gpt_oss", "int8", {"intermediate_size": 160, "head_dim": 32}, 4),
    ],
)
def test_rounded_matrices(
    family: str, quantization: str, sizes: dict[str, int], degree: int, tmp_path: Path
) -> None:
    config = write_checkpoint(family, tmp_path, **sizes).rounded(quantization)
    stored, bits = load_file(tmp_path / "model.safetensors"), int(quantization[3])
    group = int(quantization.partition(":")[2] or 32)
    names = set[str]()
    for shard in make_shards(config, pipeline_parallel=1, tensor_parallel=degree):
        decoder, _ = load_model(
            tmp_path, "float32", shard=shard, group=ThreadGroup.alone(), quantization=quantization
        )
        for part, numbers, is_packed in slices(decoder, config, shard):
            own_bits = 8 if part.parameter in ("embedding.weight", "lm_head.weight") else bits
            wanted = expected_values(stored[part.name], own_bits, group)[part.source]
            assert is_packed and torch.equal(numbers, wanted), part
            names.add(part.name)
    assert any(name.endswith(("down_proj.weight", "down_proj")) for name in names)


def test_heads_that_cut_a_group_are_refused_by_name(tmp_path: Path) -> None:
    """Four heads of 16 columns have two groups of 32."""
    config = write_checkpoint("llama", tmp_path)
    shard = make_shards(config, pipeline_parallel=1, tensor_parallel=4)[0]
    line = (
        "^--tp 4 would cut groups of 32 columns in model.layers.0.self_attn.o_proj.weight, which "
        "has 64; choose a "
    )
    with pytest.raises(UsageError, match=line):
        load_model(tmp_path, "float32", shard=shard, group=ThreadGroup.alone(), quantization="int4")


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_matrices_that_are_rounded_for_a_gpu(quantization: str, tmp_path: Path) -> None:
    """Their groups have 128 columns; of three such groups, ranks get two and one."""
    config = write_checkpoint(
        "llama", tmp_path, hidden_size=128, intermediate_size=384, head_dim=64
    )
    stored, bits = load_file(tmp_path / "model.safetensors"), int(quantization[3])
    config = config.rounded(quantization, on_gpu=True)
    for shard in make_shards(config, pipeline_parallel=1, tensor_parallel=2):
        weights = ReshardableWeights(
            tmp_path,
            config,
            dtype=torch.float32,
            device=torch.device("cpu"),
            shards=[shard],
            groups=[ThreadGroup.alone()],
        )
        for part, numbers, is_packed in slices(weights.decoders[0], config, shard):
            own_bits = 8 if part.parameter in ("embedding.weight", "lm_head.weight") else bits
            group = 64 if part.parameter.endswith("output.weight") else 128
            assert is_packed and torch.equal(
                numbers, expected_values(stored[part.name], own_bits, group)[part.source]
            )


def test_random_weights_are_rounded_as_one_matrix(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path, intermediate_size=160, moe_intermediate_size=96)
    spec = str(tmp_path / "config.json")
    plain, config = make_dummy_model(spec)
    whole = {part.name: numbers for part, numbers, _ in slices(plain, config, whole_model(config))}
    config = config.rounded("int4")
    for shard in make_shards(config, pipeline_parallel=1, tensor_parallel=2):
        decoder, _ = make_dummy_model(
            spec, shard=shard, group=ThreadGroup.alone(), quantization="int4"
        )
        for part, numbers, is_packed in slices(decoder, config, shard):
            bits = 8 if part.parameter in ("embedding.weight", "lm_head.weight") else 4
            assert is_packed and torch.equal(
                numbers, expected_values(whole[part.name], bits, 32)[part.source]
            ), part


def check_slices(directory: Path, degree: int, *, packed: bool) -> None:
    """Whole models of every format are compared with transformers elsewhere."""
    config = ModelConfig.from_directory(directory)
    decoder, _ = load_model(directory, "float32")
    whole = {
        (part.name, part.parameter): numbers
        for part, numbers, _ in slices(decoder, config, whole_model(config))
    }
    for shard in make_shards(config, pipeline_parallel=1, tensor_parallel=degree):
        decoder, _ = load_model(directory, "float32", shard=shard, group=ThreadGroup.alone())
        for part, numbers, is_packed in slices(decoder, config, shard):
            assert torch.equal(numbers, whole[part.name, part.parameter][part.source]), part
            assert is_packed is packed or part.parameter in ("embedding.weight", "lm_head.weight")


@pytest.mark.parametrize(
    ("family", "method", "settings", "inner"),
    [
        ("llama", "compressed-tensors", {"bits": 4, "group": 32, "symmetric": False}, 96),
        ("mistral", "compressed-tensors", {"bits": 3, "group": 32}, 96),
        ("qwen3", "compressed-tensors", {"bits": 8, "group": 64}, 192),
        ("qwen3", "awq", {"bits": 4, "group": 32}, 160),
        ("llama", "gptq", {"bits": 4, "group": 32}, 96),
        ("llama", "gptq_v2", {"bits": 8, "group": 32}, 96),
        ("qwen3_moe", "mxfp4", {}, 192),
        ("gpt_oss", "mxfp4", {}, 96),
        ("qwen3_moe", "compressed-tensors", {"bits": 4, "group": 32}, 192),
    ],
)
def test_quantized_checkpoints(
    family: str, method: str, settings: dict[str, Any], inner: int, tmp_path: Path
) -> None:
    write_random(family, tmp_path, method, inner=inner, **settings)
    check_slices(tmp_path, 2, packed=True)


def test_numbers_of_eight_bits_are_divided_evenly(tmp_path: Path) -> None:
    write_random("mistral", tmp_path, "fp8", inner=96)
    check_slices(tmp_path, 2, packed=False)


@pytest.mark.parametrize(
    ("family", "block_type", "inner"),
    [
        ("llama-tied-biased", "Q4_0", 96),
        ("llama-linear", "Q4_1", 96),
        ("llama-yarn", "Q5_0", 160),
        ("qwen3_moe", "Q8_0", 96),
        ("qwen3", "Q4_K", 768),
        ("qwen3", "Q5_K", 768),
        ("glm4", "Q6_K", 768),
    ],
)
def test_gguf_files(family: str, block_type: str, inner: int, tmp_path: Path) -> None:
    _, directory = make_model(family, block_type, tmp_path, inner=inner, head_dim=128)
    check_slices(directory, 2, packed=True)


@pytest.mark.parametrize(("family", "degree"), [("gpt_oss", 2), ("qwen3", 4)])
def test_ranks_together_compute_what_one_does(family: str, degree: int, tmp_path: Path) -> None:
    """Columns that only pad a rank's part change nothing; of four ranks one has no part."""
    write_random(family, tmp_path, "mxfp4", inner=96)
    config = ModelConfig.from_directory(tmp_path)
    shards = make_shards(config, pipeline_parallel=1, tensor_parallel=degree)
    _, wanted = whole_logits(tmp_path, *ragged_batch(config))
    _, logits = sharded_logits(tmp_path, shards, *ragged_batch(config))
    torch.testing.assert_close(logits, wanted, atol=2e-4 * float(wanted.abs().max()), rtol=0)
