"""Weights that go to and fro between two layouts are those that each layout's shard is loaded
with."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import Shard, make_shards
from tests.models.test_shards import UNEVEN, write_checkpoint
from tests.models.thread_ranks import ThreadGroup
from tests.oracle.checkpoints import FAMILIES, make_checkpoint, rename_glm_as_chatglm

Degrees = tuple[int, int]
"""Degrees of pipeline and tensor parallelism."""
P2, T2, P4, T4, T2P2 = (2, 1), (1, 2), (4, 1), (1, 4), (2, 2)
PAIRS: list[tuple[Degrees, Degrees]] = [(P2, T2), (P4, T4), (T2P2, T4), (T4, P4)]
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}

# Of the families' variants those whose tensors differ; rotary angles and windows are not weights.
KINDS = [
    "llama",
    "llama-tied-biased",
    "qwen2",
    "qwen3",
    "glm",
    "glm4",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-sparse-step",
]


def shards_of(config: ModelConfig, degrees: Degrees) -> list[Shard]:
    return make_shards(config, pipeline_parallel=degrees[0], tensor_parallel=degrees[1])


def reshardable(
    directory: Path,
    pair: tuple[Degrees, Degrees],
    rank: int,
    dtype: torch.dtype = torch.float32,
    quantization: str | None = None,
) -> ReshardableWeights:
    config = ModelConfig.from_directory(directory).rounded(quantization)
    shards = [shards_of(config, degrees)[rank] for degrees in pair]
    groups = [ThreadGroup.alone() if shard.degree > 1 else None for shard in shards]
    device = torch.device("cpu")
    return ReshardableWeights(
        directory, config, dtype=dtype, device=device, shards=shards, groups=groups
    )


def loaded_shards(
    directory: Path, degrees: Degrees, dtype: str = "fp32", **more: str | None
) -> list[Decoder]:
    shards = shards_of(ModelConfig.from_directory(directory), degrees)
    return [
        load_model(directory, dtype, shard=shard, group=ThreadGroup.alone(), **more)[0]
        for shard in shards
    ]


def assert_same_weights(found: Decoder, expected: Decoder) -> None:
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    present = dict(found.named_parameters()) | dict(found.named_buffers())
    assert present.keys() == wanted.keys()
    assert found.config == expected.config
    for name, tensor in present.items():
        assert torch.equal(tensor, wanted[name]), name


def assert_goes_to_and_fro(
    directory: Path,
    pairs: Sequence[tuple[Degrees, Degrees]],
    dtype: torch.dtype = torch.float32,
    **more: str | None,
) -> None:
    name = str(dtype).removeprefix("torch.")
    loaded = {
        degrees: loaded_shards(directory, degrees, name, **more)
        for pair in pairs
        for degrees in pair
    }
    for pair in pairs:
        for rank in range(pair[0][0] * pair[0][1]):
            weights = reshardable(directory, pair, rank, dtype, **more)
            assert_same_weights(weights.decoders[0], loaded[pair[0]][rank])
            for layout in (1, 0, 0, 1):
                moved = weights.fill(layout)
                assert_same_weights(weights.decoders[layout], loaded[pair[layout]][rank])
                own = weights.decoders[layout].parameters()
                size = sum(parameter.nbytes for parameter in own if parameter.dtype != torch.int64)
                assert 0 < moved <= size <= weights.storage_bytes


@pytest.mark.parametrize(("number", "family"), list(enumerate(KINDS)))
def test_every_layout_has_the_weights_of_its_shard(
    number: int, family: str, tmp_path: Path
) -> None:
    """Each family goes through two pairs of layouts, and each pair is gone through by several
    families."""
    write_checkpoint(family, tmp_path, **UNEVEN, **FOUR_LAYERS)
    assert_goes_to_and_fro(tmp_path, PAIRS[number % 2 :: 2])


def test_sizes_that_divide_need_no_padding(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, **FOUR_LAYERS)
    assert_goes_to_and_fro(tmp_path, PAIRS[::2], torch.bfloat16)


def test_checkpoints_of_hugging_face_in_several_files(tmp_path: Path) -> None:
    make_checkpoint("glm", tmp_path)
    rename_glm_as_chatglm(tmp_path, tmp_path / "chatglm")
    make_checkpoint("llama-tied-biased", tmp_path / "llama", shard_size="60KB")
    for directory in (tmp_path / "chatglm", tmp_path / "llama"):
        assert_goes_to_and_fro(directory, [(T2P2, T4)])


def test_matrices_that_are_rounded(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, **FOUR_LAYERS, intermediate_size=128)
    assert_goes_to_and_fro(tmp_path, [(P2, T2)], torch.bfloat16, quantization="int4")


@pytest.mark.parametrize("rank", range(4))
def test_nothing_shows_through_of_what_was_there_before(rank: int, tmp_path: Path) -> None:
    write_checkpoint("llama-tied-biased", tmp_path, **UNEVEN, **FOUR_LAYERS)
    weights = reshardable(tmp_path, (P4, T4), rank)
    for layout, degrees in [(1, T4), (0, P4)]:
        for decoder in weights.decoders:
            for parameter in decoder.parameters():
                parameter.fill_(float("nan"))
        weights.fill(layout)
        assert_same_weights(weights.decoders[layout], loaded_shards(tmp_path, degrees)[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_both_layouts_stay_in_one_storage(dtype: torch.dtype, tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, **UNEVEN, **FOUR_LAYERS)
    weights = reshardable(tmp_path, (P2, T2), 1, dtype)
    parameters = [parameter for decoder in weights.decoders for parameter in decoder.parameters()]
    before = [parameter.data_ptr() for parameter in parameters]
    for layout in (1, 0, 1):
        weights.fill(layout)
    assert [parameter.data_ptr() for parameter in parameters] == before
    (storage,) = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    assert all((address - storage) % 256 == 0 for address in before)
    assert {parameter.untyped_storage().nbytes() for parameter in parameters} == {
        weights.storage_bytes
    }
    sizes = [
        sum(parameter.nbytes for parameter in decoder.parameters()) for decoder in weights.decoders
    ]
    assert max(sizes) <= weights.storage_bytes < max(sizes) + 256 * len(parameters)


def test_a_tied_matrix_is_one_where_a_stage_has_both_ends_and_apart_elsewhere(
    tmp_path: Path,
) -> None:
    config = write_checkpoint("qwen2", tmp_path, **FOUR_LAYERS)
    weights = reshardable(tmp_path, (P2, T2), 1)
    apart, tied = weights.decoders
    assert not hasattr(apart, "embedding")
    assert tied.lm_head.weight is tied.embedding.weight
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(apart.lm_head.weight, embedding)
    weights.fill(1)
    assert torch.equal(tied.embedding.weight, embedding[config.vocab_size // 2 :])


def test_layouts_are_filled_from_files_that_are_gone_or_replaced(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, **FOUR_LAYERS)
    loaded = loaded_shards(tmp_path, T4)
    weights = reshardable(tmp_path, (P4, T4), 2)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    weights.fill(1)
    assert_same_weights(weights.decoders[1], loaded[2])
    weights.fill(0)
    (tmp_path / "model.safetensors").write_bytes(b"another model")
    weights.fill(1)
    assert_same_weights(weights.decoders[1], loaded[2])


def test_pieces_are_the_same_as_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("mixtral", tmp_path, **UNEVEN, **FOUR_LAYERS)
    monkeypatch.setattr("nanoserve.models.resharding._PIECE_NUMBERS", 1000)
    assert_goes_to_and_fro(tmp_path, [(P2, T2)])


def test_progress_ends_at_the_bytes_of_the_layout(tmp_path: Path) -> None:
    config = write_checkpoint("llama", tmp_path, **FOUR_LAYERS)
    weights = reshardable(tmp_path, (P2, T2), 0)
    seen: list[tuple[int, int]] = []
    moved = weights.fill(1, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (moved, moved)
    numbers = sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    norms = config.hidden_size * (2 * config.num_layers + 1)
    assert moved == 4 * ((numbers - norms) // 2 + norms)


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        reshardable(directory, (P2, T2), 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_checkpoint_is_named_at_the_start(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path, **FOUR_LAYERS)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "model.safetensors: not a complete safetensors file" in refusal(tmp_path)
    file.write_bytes(content)
    damaged = load_file(file)
    damaged["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(damaged, file)
    assert (
        "tensor model.layers.1.mlp.down_proj.weight has NaN or infinite values as float32"
        in refusal(tmp_path)
    )
    (tmp_path / "config.json").write_text(
        json.dumps(FAMILIES["llama"]().to_dict() | {"num_hidden_layers": 6})
    )
    assert "is missing from the checkpoint" in refusal(tmp_path)
