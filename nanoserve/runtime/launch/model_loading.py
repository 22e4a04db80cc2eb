"""A model on its device: what the engine's own process and a worker do alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from nanoserve.config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.models.decoder import Decoder, TensorParallelGroup
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.hub import ProgressCallback, ResolvedModel, dummy_config
from nanoserve.models.loading import load_model
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import Shard
from nanoserve.processes.files import unreadable_as_model_error
from nanoserve.processes.sizes import format_size
from nanoserve.runtime.launch.devices import check_model, use_writable_triton_cache
from nanoserve.runtime.launch.memory import memory_errors


def read_config(resolved: ResolvedModel) -> ModelConfig:
    """The model's shape; nothing else of it is read. Raises ModelError if it cannot be used."""
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
    """The decoder with its weights, or a shard of it, and the config of the whole model. Raises ModelError if the model
    cannot be used; UsageError if a setting makes no sense for it; RuntimeFailure if the memory does not suffice."""
    with _loading(resolved, config, device):
        if resolved.directory is None:
            return make_dummy_model(resolved.name, config.dtype, device, shard=shard, group=group)
        told = None if progress is None else partial(progress, "load")
        return load_model(resolved.directory, config.dtype, device, told, shard=shard, group=group)


def load_layouts(
    resolved: ResolvedModel,
    config: EngineConfig,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    shards: Sequence[Shard],
    groups: Sequence[TensorParallelGroup | None],
) -> ReshardableWeights:
    """A worker's decoders under several layouts, the first of which is in place. Raises ModelError, UsageError,
    RuntimeFailure as `load_decoder`.

    Args:
        resolved: in a directory; a dummy is written to one first.
        shards, groups: of this worker, for each layout.
    """
    model, directory = read_config(resolved), resolved.directory
    assert directory is not None, "weights that are read more than once are in files"
    told = None if progress is None else partial(progress, "load")
    with _loading(resolved, config, device):
        dtype = resolve_dtype(config.dtype, device, model.dtype)
        return ReshardableWeights(
            directory, model, dtype=dtype, device=device, shards=shards, groups=groups, progress=told
        )


@contextmanager
def _loading(resolved: ResolvedModel, config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Check that a GPU can run the model, and say in one line what keeps it from being loaded."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of our own are launched on the current one
        use_writable_triton_cache()
        check_model(device, read_config(resolved), config.dtype, config.block_size)
    files = () if resolved.directory is None else resolved.directory.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    problem = f"a checkpoint of {format_size(size)} does not fit" if size else "the weights do not fit"
    advice = "choose a smaller model or --dtype, or free some memory"
    with unreadable_as_model_error(), memory_errors(device, problem, advice):
        yield
