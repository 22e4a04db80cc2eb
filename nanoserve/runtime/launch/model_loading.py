"""A model on its device: what the engine's own process and a worker do alike."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from nanoserve.config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.models.decoder import Decoder, TensorParallelGroup
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shapes import dummy_config
from nanoserve.models.shards import Shard
from nanoserve.processes.files import unreadable_as_model_error
from nanoserve.runtime.launch.devices import check_model, use_writable_triton_cache
from nanoserve.runtime.launch.memory import memory_errors, weights_do_not_fit

_LESS_MEMORY = "choose a smaller model or --dtype, or free some memory"


def read_config(resolved: ResolvedModel) -> ModelConfig:
    """The model's shape; nothing else of it is read.

    Raises:
        ModelError: if it cannot be used.
    """
    with unreadable_as_model_error():
        if resolved.directory is None:
            return dummy_config(resolved.name)
        return ModelConfig.from_directory(resolved.directory)


def load_decoder(
    resolved: ResolvedModel,
    config: EngineConfig,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    shard: Shard | None = None,
    group: TensorParallelGroup | None = None,
) -> tuple[Decoder, ModelConfig]:
    """The decoder with its weights, or a shard of it, and the config of the whole model.

    Raises:
        ModelError: if the model cannot be used.
        UsageError: if a setting makes no sense for it.
        RuntimeFailure: if the memory does not suffice.
    """
    if device.type == "cuda":
        _prepare(device, read_config(resolved), config)
    problem = weights_do_not_fit(resolved.directory)
    with unreadable_as_model_error(), memory_errors(device, problem, _LESS_MEMORY):
        if resolved.directory is None:
            return make_dummy_model(resolved.name, config.dtype, device, shard=shard, group=group)
        told = None if progress is None else partial(progress, "load")
        return load_model(resolved.directory, config.dtype, device, told, shard=shard, group=group)


def load_layouts(
    directory: Path,
    config: EngineConfig,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    shards: Sequence[Shard],
    groups: Sequence[TensorParallelGroup | None],
) -> tuple[ReshardableWeights, ModelConfig]:
    """A worker's decoders under several layouts, the first of which is in place, and the config of the whole model.

    Args:
        directory: of the model; a dummy is written to one first.
        shards, groups: of this worker, for each layout.

    Raises:
        ModelError, UsageError, RuntimeFailure: as `load_decoder`.
    """
    with unreadable_as_model_error():
        model = ModelConfig.from_directory(directory)
    if device.type == "cuda":
        _prepare(device, model, config)
    told = None if progress is None else partial(progress, "load")
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    with unreadable_as_model_error(), memory_errors(device, weights_do_not_fit(directory), _LESS_MEMORY):
        weights = ReshardableWeights(
            directory, model, dtype=dtype, device=device, shards=shards, groups=groups, progress=told
        )
    return weights, model


def _prepare(device: torch.device, model: ModelConfig, config: EngineConfig) -> None:
    torch.cuda.set_device(device)  # kernels of our own are launched on the current one
    use_writable_triton_cache()
    check_model(device, model, config.dtype, config.block_size)
