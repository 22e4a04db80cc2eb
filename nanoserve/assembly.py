"""Put a model and an engine together: LLM does so in its own process, a server in its engine process."""

from dataclasses import dataclass
from functools import partial

import torch

from nanoserve.config import EngineConfig, ModelConfig, SamplingDefaults
from nanoserve.engine import Engine
from nanoserve.errors import ModelError, UsageError
from nanoserve.files import unreadable_as_model_error
from nanoserve.models.decoder import Decoder
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.request import SamplingParams
from nanoserve.runtime.local import LocalExecutor
from nanoserve.runtime.memory import choose_num_blocks
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and what its users need to know of its model.

    Attributes:
        max_model_len: longest sequence in tokens that the engine takes.
        default_params: what the model's generation_config.json recommends.
    """

    engine: Engine
    model: ModelConfig
    max_model_len: int
    default_params: SamplingParams


def build_engine(
    resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None = None
) -> BuiltEngine:
    """Load the weights and put cache, executor and scheduler around them; the caller closes the engine.

    Raises:
        ModelError: if the model cannot be used.
        UsageError: if a setting makes no sense for it.
        RuntimeFailure: if the memory does not suffice.
    """
    with unreadable_as_model_error():
        decoder, model = _load(resolved, config, progress)
    default_params = _default_params(model.sampling_defaults)
    engine, max_model_len = _make_engine(decoder, model, config)
    return BuiltEngine(engine, model, max_model_len, default_params)


def _load(
    resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None
) -> tuple[Decoder, ModelConfig]:
    if resolved.directory is None:
        return make_dummy_model(resolved.name, config.dtype, config.device)
    return load_model(
        resolved.directory, config.dtype, config.device, None if progress is None else partial(progress, "load")
    )


def _make_engine(decoder: Decoder, model: ModelConfig, config: EngineConfig) -> tuple[Engine, int]:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise UsageError(f"--max-model-len {config.max_model_len} is beyond the model's own limit of {longest}")
    num_blocks = choose_num_blocks(
        model,
        block_size=config.block_size,
        dtype=decoder.embedding.weight.dtype,
        device=config.device,
        kv_cache_memory=config.kv_cache_memory,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    max_model_len = min(config.max_model_len or longest, num_blocks * config.block_size)
    executor = LocalExecutor(
        decoder, model, num_blocks=num_blocks, block_size=config.block_size, device=torch.device(config.device)
    )
    scheduler = Scheduler(
        make_policy(config.policy, config.max_num_batched_tokens),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        prefix_caching=config.enable_prefix_caching,
        pipeline_depth=executor.max_in_flight,
    )
    return Engine(scheduler, executor, vocab_size=model.vocab_size), max_model_len


def _default_params(defaults: SamplingDefaults) -> SamplingParams:
    named = {field: getattr(defaults, field) for field in defaults.__slots__}
    try:
        return SamplingParams(**{name: value for name, value in named.items() if value is not None})
    except UsageError as error:  # not the user's doing
        raise ModelError(f"generation_config.json of the model: {error}") from error
