"""The profile of a pipeline is measured in its first stage, over layers and a cache that it has
anyway."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.profile import write_profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.profiling import start_profile
from nanoserve.executor.profiling.parts import Effort
from nanoserve.executor.profiling.start_profile import StartingEngine, hybrid_profile
from nanoserve.executor.stage import Stage
from nanoserve.executor.start.memory import kv_bytes_per_block
from nanoserve.executor.workers.building import as_whole_model, as_whole_stage
from nanoserve.models.decoder import Decoder
from nanoserve.models.shards import make_shards
from tests.executor.small_model import small_config
from triton_ops.cpu import cpu_operators

BLOCK_SIZE, NUM_BLOCKS, LAYERS = 4, 32, 5
SPEEDS = MachineSpeeds(memory_bandwidth=1e9, flops=1e10, host_link_bandwidth=1e9)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return replace(
        small_config(), num_layers=LAYERS, layers=LayerDifferences(sliding_windows=(0,) * LAYERS)
    )


@pytest.fixture(scope="module")
def first_stage(model: ModelConfig) -> Decoder:
    """Two of the five layers, and no head."""
    torch.manual_seed(0)
    first, _ = make_shards(model, pipeline_parallel=2, tensor_parallel=1, pipeline_split=(2, 3))
    return Decoder(model, shard=first).eval()


@pytest.fixture(scope="module")
def processor() -> Iterator[HostProcessor]:
    processor = HostProcessor.set_apart(1, CPU)
    yield processor
    processor.close()


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few sizes, one round, and a cache folder of the test's own, which keeps what a busy machine
    measured, too."""
    # those of this process: looked for where the user keeps them, not in the folder of a test
    cpu_operators()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start_profile, "_MOSTLY", 0.0)
    monkeypatch.setattr(start_profile, "EFFORT", Effort(0.0, 1, 1, longest_sample=1.0))
    sizes = replace(
        start_profile.SIZES,
        tokens=(1, 4, 80),
        batches=(1, 4),
        copies=(2**10, 2**12),
        kv_bytes=2**16,
    )
    monkeypatch.setattr(start_profile, "SIZES", sizes)


def engine_of(
    decoder: Decoder, processor: HostProcessor, model: ModelConfig, **settings: str
) -> StartingEngine:
    size = NUM_BLOCKS * kv_bytes_per_block(decoder.config, BLOCK_SIZE, decoder.dtype)
    with torch.inference_mode():
        storage = torch.empty(size, dtype=torch.uint8)
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    stage = Stage.build(decoder, **sizes, device=CPU, storage=storage)
    engine = StartingEngine(
        stage=as_whole_stage(stage, storage, BLOCK_SIZE),
        config=EngineConfig(
            policy="hybrid", pipeline_parallel=2, block_size=BLOCK_SIZE, **settings
        ),
        model=model,
        speeds=SPEEDS,
        processor=processor,
    )
    caches = [
        (one.caches.keys[0].data_ptr(), len(one.caches.keys))
        for one in (stage.runner, engine.runner)
    ]
    assert caches[0] == caches[1], "the stage's own cache"
    return engine


def test_the_first_stage_as_a_model_takes_no_further_memory(first_stage: Decoder) -> None:
    whole = as_whole_model(first_stage)
    assert len(whole.layers) == whole.config.num_layers == 2
    assert whole.shard.is_first and whole.shard.is_last
    mine = {parameter.data_ptr() for parameter in first_stage.parameters()}
    further = [parameter for parameter in whole.parameters() if parameter.data_ptr() not in mine]
    assert sum(parameter.numel() for parameter in further) == whole.config.hidden_size, (
        "the last norm"
    )
    assert not hasattr(first_stage, "lm_head")


def test_the_profile_is_of_the_whole_model(
    first_stage: Decoder,
    processor: HostProcessor,
    model: ModelConfig,
    briefly: None,
    tmp_path: Path,
) -> None:
    engine = engine_of(first_stage, processor, model)
    told: list[str] = []
    profile = hybrid_profile(engine, lambda stage, done, total: told.append(stage))
    assert profile is not None and profile.model == model
    assert hybrid_profile(engine) == profile and len(told) == 2, "kept, and measured once"
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert hybrid_profile(engine_of(first_stage, processor, model, profile=str(path))) == profile


def test_a_profile_of_the_stage_alone_is_one_of_another_model(
    first_stage: Decoder,
    processor: HostProcessor,
    model: ModelConfig,
    briefly: None,
    tmp_path: Path,
) -> None:
    profile = hybrid_profile(engine_of(first_stage, processor, first_stage.config))
    assert profile is not None
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    with pytest.raises(UsageError, match=r"is a profile of another model"):
        hybrid_profile(engine_of(first_stage, processor, model, profile=str(path)))
