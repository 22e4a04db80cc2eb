"""Shapes of real models, filled with random weights."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanoserve.config.published_shapes import published_shapes
from nanoserve.errors import ModelError, RuntimeFailure
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.dummy import make_dummy_model, save_dummy_checkpoint
from nanoserve.models.hub import dummy_config
from nanoserve.models.loading import load_model
from nanoserve.models.shards import make_shards
from tests.models.thread_ranks import ThreadGroup
from tests.oracle.checkpoints import FAMILIES

# Published sizes, in millions of parameters.
PUBLISHED_MILLIONS = {
    "smollm2-135m": 135,
    "llama-3.2-1b": 1236,
    "llama-3.1-8b": 8030,
    "llama-3.1-70b": 70554,
    "llama-2-7b": 6738,
    "mistral-7b": 7248,
    "mixtral-8x7b": 46703,
    "qwen2.5-0.5b": 494,
    "qwen2.5-14b": 14770,
    "qwen2.5-32b": 32764,
    "qwen3-0.6b": 596,
    "qwen3-8b": 8191,
    "qwen3-30b-a3b": 30532,
    "glm-4-9b": 9400,
    "glm-4-32b": 32566,
}


def tiny_config(directory: Path) -> str:
    path = directory / "tiny.json"
    tiny = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    path.write_text(
        json.dumps(
            {
                **published_shapes()["qwen2.5-0.5b"],
                **tiny,
                "vocab_size": 50,
                "tie_word_embeddings": True,
            }
        )
    )
    return str(path)


@pytest.mark.parametrize("name", published_shapes())
def test_every_shape_is_a_valid_model_of_the_published_size(name: str) -> None:
    config = dummy_config(f"dummy:{name}")
    built = config
    if not config.layers.shapes:  # all layers are equal: one of them counts for all
        layers = replace(config.layers, sliding_windows=config.layers.sliding_windows[:1])
        built = replace(config, num_layers=1, layers=layers)
    with torch.device("meta"):
        decoder = Decoder(built)
    whole, layer = (
        sum(parameter.numel() for parameter in one.parameters())
        for one in (decoder, decoder.layers[0])
    )
    millions = (whole + (config.num_layers - built.num_layers) * layer) / 1e6
    assert millions == pytest.approx(PUBLISHED_MILLIONS.get(name, millions), rel=0.005)


def test_progress_is_counted_in_numbers(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    decoder, _ = make_dummy_model(
        tiny_config(tmp_path), progress=lambda done, total: told.append((done, total))
    )
    numbers = sum(parameter.numel() for parameter in decoder.parameters())
    assert told[-1] == (numbers, numbers) and told[0][0] < numbers
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_dummy_weights_are_the_same_every_time_and_finite(tmp_path: Path) -> None:
    spec = tiny_config(tmp_path)
    first, config = make_dummy_model(spec, "fp32")
    second, _ = make_dummy_model(f"dummy:{spec}", "fp32")
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert first.embedding.weight.std() == pytest.approx(0.02, rel=0.1)
    attention = DenseCausalAttention(config, batch=1, length=5)
    logits = first.compute_logits(first(torch.arange(5), torch.arange(5), attention))
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.parametrize(("pipeline_parallel", "tensor_parallel"), [(2, 1), (1, 2), (2, 2)])
def test_a_shard_has_the_weights_of_the_whole(
    pipeline_parallel: int, tensor_parallel: int, tmp_path: Path
) -> None:
    spec = tiny_config(tmp_path)
    whole, config = make_dummy_model(spec, "fp32")
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = whole.layers[1].qkv.weight.split((query, key, key))
    layouts = {"pipeline_parallel": pipeline_parallel, "tensor_parallel": tensor_parallel}
    for shard in make_shards(config, **layouts)[-tensor_parallel:]:
        last, _ = make_dummy_model(spec, "fp32", shard=shard, group=ThreadGroup.alone())
        mine = torch.cat([matrix.chunk(tensor_parallel)[shard.rank] for matrix in heads])
        assert torch.equal(last.layers[-1].qkv.weight, mine)
        assert torch.equal(
            last.layers[-1].output.weight, whole.layers[1].output.weight[:, shard.share(query)]
        )
        assert torch.equal(
            last.lm_head.weight, whole.embedding.weight[shard.share(config.vocab_size)]
        )


def test_an_unknown_shape_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"unknown shape 'gpt-7'; .*qwen3-0\.6b"):
        make_dummy_model("dummy:gpt-7")
    with pytest.raises(ModelError, match="no such file"):
        make_dummy_model(str(tmp_path / "none.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "llama-tied-biased",
        "glm4",
        "mixtral",
        "qwen3_moe",
        "lfm2",
        "qwen3_next-biased",
        "qwen3_5_text",
        "jamba",
        "granitemoehybrid-dense",
    ],
)
def test_a_written_dummy_is_the_one_that_is_made(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "shape.json"
    spec.write_text(json.dumps(FAMILIES[family]().to_dict()))
    monkeypatch.setattr("nanoserve.models.dummy._FILE_BYTES", 40_000)
    save_dummy_checkpoint(f"dummy:{spec}", dtype, tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    name = str(dtype).removeprefix("torch.")
    made, config = make_dummy_model(str(spec), name)
    read, again = load_model(tmp_path, name)
    assert again == replace(config, dtype=name)
    assert read.dtype == dtype
    weights = dict(read.named_parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in made.named_parameters())


def test_a_small_dummy_is_one_file_and_without_room_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_config(tmp_path)
    save_dummy_checkpoint(spec, torch.float32, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tiny.json",
    ]
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=10_000))
    with pytest.raises(
        RuntimeFailure, match=r"^\S+: the weights of \S+ take .* KiB, but only 9.8 KiB are free$"
    ):
        save_dummy_checkpoint(spec, torch.float32, tmp_path)
    monkeypatch.undo()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(RuntimeFailure, match=r"^\S+: the weights of \S+ cannot be written"):
        save_dummy_checkpoint(spec, torch.float32, tmp_path)
