"""A worker's weights under several layouts, loaded with one-line errors."""

from pathlib import Path

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import ModelError, RuntimeFailure, UsageError
from nanoserve.executor.start.model_loading import load_layouts
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import make_shards
from tests.models.test_shards import write_checkpoint
from tests.models.thread_ranks import ThreadGroup

CPU = torch.device("cpu")


def load(
    directory: Path, dtype: str = "fp32"
) -> tuple[ReshardableWeights, list[tuple[str, int, int]]]:
    config = ModelConfig.from_directory(directory)
    layouts = [(2, 1), (1, 2)]
    shards = [
        make_shards(config, pipeline_parallel=pp, tensor_parallel=tp)[1] for pp, tp in layouts
    ]
    told: list[tuple[str, int, int]] = []
    weights = load_layouts(
        ResolvedModel("model", directory, directory),
        EngineConfig(dtype=dtype),
        CPU,
        lambda stage, done, total: told.append((stage, done, total)),
        shards=shards,
        groups=[None, ThreadGroup.alone()],
    )
    return weights, told


def test_the_first_layout_is_in_place_and_the_other_can_be(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    weights, told = load(tmp_path)
    size = sum(parameter.nbytes for parameter in weights.decoders[0].parameters())
    assert told[-1] == ("loading", size, size)
    for layout, decoder in enumerate(weights.decoders):
        weights.fill(layout)
        loaded, _ = load_model(tmp_path, "fp32", shard=decoder.shard, group=ThreadGroup.alone())
        assert all(map(torch.equal, decoder.parameters(), loaded.parameters()))


def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("llama", tmp_path)
    with pytest.raises(UsageError, match=r"^unknown dtype 'int3'; use"):
        load(tmp_path, "int3")

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patches:
        patches.setattr("nanoserve.models.resharding._lay_out", no_memory)
        with pytest.raises(
            RuntimeFailure,
            match=r"^out of memory on cpu: a checkpoint of .* does not fit into .* free; ",
        ):
            load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(
        ModelError, match=r"^\S+model\.safetensors: not a complete safetensors file \(.*\)$"
    ):
        load(tmp_path)
