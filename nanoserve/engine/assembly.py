"""Put a model and an engine together: LLM does so in its own process, a server in its engine
process."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanoserve.config.model_config import ModelConfig, SamplingDefaults, is_eagle3
from nanoserve.engine.dispatcher import Dispatcher
from nanoserve.engine.engine import Engine
from nanoserve.engine.interface import InferenceEngine
from nanoserve.engine.settings_chooser import settings_chooser
from nanoserve.engine_config import AUTO, HEADS, EngineConfig
from nanoserve.errors import ModelError, RuntimeFailure, UsageError
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.start.device_start import DeviceStart
from nanoserve.executor.start.memory import available_memory, choose_cache_size, kv_bytes_per_block
from nanoserve.executor.start.model_loading import (
    check_canvas_settings,
    check_state_settings,
    keeps_all_positions,
    load_decoder,
    longest_with_canvas,
    read_config,
    usable_device,
    with_cache_groups,
)
from nanoserve.models.decoder import Decoder
from nanoserve.models.hub import ProgressCallback, ResolvedModel, resolve_model
from nanoserve.models.shards import shards_of_layouts
from nanoserve.request import ExpectedLengths, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.extension import NOTHING_ATTACHED
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.windows import most_tokens
from nanoserve.text.tokenizer import has_same_tokens
from triton_ops.cpu import CpuOperators, cpu_operators

if TYPE_CHECKING:
    from nanoserve.costs.hardware import MachineSpeeds
    from nanoserve.executor.cpu_attention.host_processor import HostProcessor
    from nanoserve.executor.kv_transfer.host_pool import HostPool
    from nanoserve.executor.start.gpu_start import GpuStartReport
    from nanoserve.executor.workers.executor import RemoteLayers


OPERATORS = "building operators"
"""Stage of a start in which C++ is compiled, the first time on a machine."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, its model and its settings; `prepare` compiles what makes its steps faster."""

    engine: InferenceEngine
    config: EngineConfig
    """Settings in use: those asked for, with a choice for each that was left open."""
    model: ModelConfig
    max_model_len: int
    """Longest sequence in tokens that the engine takes."""
    default_params: SamplingParams  # what the model's generation_config.json recommends
    operators: CpuOperators | None
    layers: "LayerRunner | RemoteLayers | None"
    """Operators and layers are compiled in the background, and make steps faster; None where
    nothing is compiled."""
    # seconds and bytes that getting the GPU ready took; None without one
    gpu: "GpuStartReport | None"
    speeds: "MachineSpeeds | None" = None
    """Measured speeds of each worker beside the others; None where no policy decides by them."""
    # what was chosen and why, in one line; None where nothing was left open
    choice: str | None = None

    @property
    def compiled(self) -> bool:
        """Whether the model's layers run compiled."""
        if self.gpu is not None:
            return self.gpu.compiled
        return self.layers is not None and self.layers.loaded

    def start_preparing(self) -> None:
        """Start to compile layers in the background. They are used as soon as they are ready."""
        if self.layers is not None:
            self.layers.start()

    def prepare(self, progress: ProgressCallback | None = None) -> None:
        """Wait until everything is compiled: before long batches and before measurements.

        This takes a minute the first time that a model runs on a machine, and no time later. On a
        very busy machine, code that is not compiled after some minutes is left uncompiled.
        ``progress`` is called with (stage, done, total).
        """
        if self.operators is not None:
            self.operators.start(waited=True)
        if self.layers is not None:
            self.layers.start(waited=True)
        _wait_for(OPERATORS, self.operators, progress)
        _wait_for("compiling layers", self.layers, progress)


def _wait_for(
    stage: str,
    build: "CpuOperators | LayerRunner | RemoteLayers | None",
    progress: ProgressCallback | None,
) -> None:
    if build is None or not build.pending:
        return
    if progress is not None:
        progress(stage, 0, 1)
    build.wait()
    if progress is not None:
        progress(stage, 1, 1)


def build_engine(
    resolved: ResolvedModel,
    config: EngineConfig,
    progress: ProgressCallback | None = None,
    expected: ExpectedLengths | None = None,
    on_trace_failure: Callable[[RuntimeFailure], None] = lambda failure: None,
) -> BuiltEngine:
    """Load the weights and put cache, executor and scheduler around them; the caller closes the
    engine.

    ``on_trace_failure`` is told when the trace cannot be written on; closing the engine then raises
    RuntimeFailure. Raises ModelError if the model cannot be used, UsageError if a setting makes no
    sense for it, RuntimeFailure if the memory does not suffice or the trace cannot be begun.
    """
    model = read_config(resolved, config.quantization, config.device)
    default_params = _default_params(model.sampling_defaults, resolved)
    _check_settings(config, model)
    choice = None
    if config.leaves_open:
        config, choice = settings_chooser().choose_settings(
            resolved, config, model, progress, expected
        )
    config = _choose_drafter(resolved, config, progress)
    _warn_of_unused_memory(config, model)
    build_for_devices = (
        _build_here if config.data_parallel * config.num_workers == 1 else _build_on_workers
    )
    build = partial(build_for_devices, resolved, config, progress, default_params)
    if config.trace is None:
        built = build()
    else:
        from nanoserve.engine.tracing import build_traced  # few engines are traced

        built = build_traced(Path(config.trace), build, on_trace_failure)
    return replace(built, choice=choice)


def _check_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse settings that the model or this machine cannot meet, before anything is loaded."""
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise UsageError(
            f"--max-model-len {config.max_model_len} is beyond the model's own limit of {longest}"
        )
    check_state_settings(config, model)
    check_canvas_settings(config, model)
    if config.host_threads is not None:
        from nanoserve.executor.cpu_attention.host_processor import HostProcessor

        HostProcessor.divide(config.host_threads)
    if config.profile is not None:
        # the cost model is for engines that predict
        from nanoserve.executor.start.predictors import check_profile

        check_profile(config.profile)


def _warn_of_unused_memory(config: EngineConfig, model: ModelConfig) -> None:
    """Warn where the KV cache of layers with a window takes more memory than they read."""
    warn = logging.getLogger("nanoserve").warning
    reason, groups = (
        keeps_all_positions(model, config),
        with_cache_groups(model, config).cache_groups,
    )
    if reason is not None:
        warn(
            "nanoserve: layers with a window keep all positions, which takes more memory: %s needs "
            "that",
            reason,
        )
    elif groups.padding:
        warn(
            "nanoserve: layers are in %d cache groups of %d, which leaves %.0f %% of the KV cache "
            "empty",
            len(groups.windows),
            groups.num_tensors,
            100 * groups.padding,
        )


def _choose_drafter(
    resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None
) -> EngineConfig:
    """The config with the drafter that `auto` stands for: what is in the directory eagle, medusa or
    draft of the model's, or else ngram. A draft model may be downloaded now. Raises UsageError for
    a drafter with other tokens or one that cannot work in a pipeline, ModelError if there is
    none."""
    if config.speculate == AUTO:
        config = replace(config, speculate=_bundled_drafter(resolved) or "ngram")
    kind, _, name = (config.speculate or "").partition(":")
    directory = Path(name).expanduser()
    if kind == "draft":
        directory = resolve_model(
            name, offline=config.offline, progress=progress
        ).tokenizer_directory
    elif kind not in HEADS:
        return config
    elif not (directory / "config.json").is_file():
        raise ModelError(
            f"--speculate {config.speculate}: no {directory / 'config.json'}; name a head's "
            "directory"
        )
    elif kind == "eagle" and is_eagle3(directory) and config.pipeline_parallel > 1:
        raise UsageError(
            f"--speculate {config.speculate}: an EAGLE-3 head reads layers of several stages; "
            "leave --pp out, or choose"
            " an EAGLE head"
        )
    elif not any((directory / file).exists() for file in ("tokenizer.json", "tokenizer.model")):
        return config  # what was trained on the model's own hidden states is compared by its sizes
    if not has_same_tokens(directory, resolved.tokenizer_directory):
        raise UsageError(
            f"--speculate {config.speculate}: its tokenizer is not that of {resolved.name}; choose "
            "a drafter that was"
            " made for this model, or ngram"
        )
    return config


def _bundled_drafter(resolved: ResolvedModel) -> str | None:
    """The drafter that lies in the model's own directory, as --speculate names it; None if there is
    none."""
    if resolved.directory is None:
        return None
    for kind in (*HEADS, "draft"):
        place = resolved.tokenizer_directory / kind
        if place.is_dir():
            return f"{kind}:{place}"
    return None


def _build_here(
    resolved: ResolvedModel,
    config: EngineConfig,
    progress: ProgressCallback | None,
    default_params: SamplingParams,
) -> BuiltEngine:
    """On one device, in this process."""
    _make_policy(config)  # an impossible policy is refused before anything is loaded
    device = usable_device(config.device)
    decoder, model = load_decoder(resolved, config, device, progress)
    start = DeviceStart(resolved, config, [decoder], device)
    gpu = start.gpus[0] if start.gpus else None
    reserved, longest = start.reserved_bytes(progress), model.max_position_embeddings
    free, windows = max(0, available_memory(decoder.device) - reserved), model.cache_groups.windows
    cache_size = choose_cache_size(
        start.block_bytes[0], start.state_bytes, free, longest, config, windows
    )
    num_blocks, state_slots = cache_size.num_blocks, cache_size.state_slots
    host_pool = _host_pool(decoder, model, config, num_blocks) if config.uses_host_memory else None
    predicting = None
    if host_pool is not None or config.speculate is not None:
        # the cost model is for engines that predict
        from nanoserve.executor.start.predictors import DevicePredictors

        predicting = DevicePredictors(device, decoder.dtype)
    max_model_len = _longest(config, model, num_blocks)
    # Before anything is compiled for a number of threads.
    processor = _set_apart(config, device) if config.attends_on_host else None
    operators = layers = None
    if gpu is None:
        operators, layers = cpu_operators(), start.layers[0]
        if config.batch_invariant:  # only these operators compute so
            _wait_for(OPERATORS, operators, progress)
    overlaps = _overlaps_steps(config, model, device)
    (stage,) = start.stages(
        [num_blocks], host_pool, processor, state_slots=state_slots, async_scheduling=overlaps
    )
    executor = LocalExecutor(stage, async_scheduling=overlaps)
    facts = None if gpu is None else gpu.capture(executor.runner, max_model_len, progress)
    predictors: Sequence[Predictor] = ()
    if predicting is not None:
        try:
            predictors = predicting.of(stage, config, model, processor, progress)
        except UsageError:  # the profile that is given is of something else
            executor.close()
            raise
    host_blocks = 0 if host_pool is None else host_pool.num_blocks
    capacities = [LayoutCapacity(num_blocks)]
    scheduler = _make_scheduler(
        config,
        model,
        capacities,
        max_model_len,
        host_blocks,
        predictors,
        state_slots=state_slots,
        async_scheduling=overlaps,
    )
    engine = Engine(scheduler, executor, vocab_size=model.vocab_size)
    return BuiltEngine(
        engine, config, model, max_model_len, default_params, operators, layers, facts
    )


def _overlaps_steps(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether the next step is launched while a device computes one: the CPU is both, and gains
    nothing by it. The next step of a canvas needs to know which of its tokens are settled."""
    return device.type == "cuda" and not config.eager and model.canvas is None


def _set_apart(config: EngineConfig, device: torch.device) -> "HostProcessor":
    from nanoserve.executor.cpu_attention.host_processor import HostProcessor

    return HostProcessor.set_apart(config.host_threads, device)


def _build_on_workers(
    resolved: ResolvedModel,
    config: EngineConfig,
    progress: ProgressCallback | None,
    default_params: SamplingParams,
) -> BuiltEngine:
    """On several devices, each with a process of its own: one engine, or several behind a
    dispatcher."""
    from nanoserve.executor.kv_transfer.host_pool import choose_host_blocks
    from nanoserve.executor.start.predictors import worker_predictors

    # ZeroMQ is for them alone
    from nanoserve.executor.workers.executor import start_workers, wait_for_news

    model = with_cache_groups(read_config(resolved, config.quantization, config.device), config)
    # a model that cannot be divided is refused before any process is started
    shards_of_layouts(model, config)
    _make_policy(config)  # likewise
    host_blocks = choose_host_blocks(model, config)
    executors = start_workers(
        resolved,
        config,
        model=model,
        host_blocks=host_blocks,
        progress=progress,
        observe_times=config.trace is not None,
        profiles=config.attends_on_host,
    )
    blocks = min(capacity.num_blocks for executor in executors for capacity in executor.capacities)
    if config.decode_layout is not None:  # every sequence passes through host memory
        blocks = min(blocks, host_blocks)
    max_model_len = _longest(config, model, blocks)
    engines = []
    for executor in executors:
        predictors = worker_predictors(resolved, config, model, executor.speeds, executor.profile)
        scheduler = _make_scheduler(
            config,
            model,
            executor.capacities,
            max_model_len,
            host_blocks,
            predictors,
            state_slots=executor.state_slots,
        )
        engines.append(Engine(scheduler, executor, vocab_size=model.vocab_size))
    layers, speeds = executors[0].layers, executors[0].speeds
    if len(engines) == 1:
        return BuiltEngine(
            engines[0], config, model, max_model_len, default_params, None, layers, None, speeds
        )

    def wait(until: float | None) -> None:
        layers.go_on()
        wait_for_news(executors, until)

    driven = Dispatcher(engines, wait)
    return BuiltEngine(
        driven, config, model, max_model_len, default_params, None, layers, None, speeds
    )


def _host_pool(
    decoder: Decoder, model: ModelConfig, config: EngineConfig, num_blocks: int
) -> "HostPool | None":
    """A pool in memory of this process, beside `num_blocks` on its device; None if it would have no
    block."""
    from nanoserve.executor.kv_transfer.host_pool import HostPool, choose_host_blocks

    on_cpu = decoder.device.type == "cpu"
    cache = (
        num_blocks * kv_bytes_per_block(model, config.block_size, decoder.dtype) if on_cpu else 0
    )
    host_blocks = choose_host_blocks(model, config, reserved=cache)
    if host_blocks == 0:
        return None
    return HostPool.of_one_process(
        model, num_blocks=host_blocks, block_size=config.block_size, dtype=decoder.dtype
    )


def _longest(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """Tokens of the longest sequence that is asked for, or allowed by the model, and fits. Raises
    UsageError if the memory does not hold a canvas of the model's."""
    most = config.max_model_len or model.max_position_embeddings
    windows = model.cache_groups.windows
    if model.canvas is not None:
        return longest_with_canvas(model.canvas, windows, num_blocks, config.block_size, most)
    return most_tokens(windows, num_blocks, config.block_size, most)


def _make_scheduler(
    config: EngineConfig,
    model: ModelConfig,
    capacities: Sequence[LayoutCapacity],
    max_model_len: int,
    host_blocks: int = 0,
    predictors: Sequence[Predictor] = (),
    *,
    state_slots: int = 0,
    async_scheduling: bool = False,
) -> Scheduler:
    first, *others = capacities
    extensions = NOTHING_ATTACHED
    if host_blocks or others or config.speculate is not None or state_slots or model.canvas:
        from nanoserve.engine.extensions import engine_extensions  # most engines do without

        extensions = engine_extensions(
            config,
            host_blocks=host_blocks,
            other_layouts=others,
            state_slots=state_slots,
            async_scheduling=async_scheduling,
            canvas=model.canvas,
        )
    scheduler = Scheduler(
        _make_policy(config, host_blocks),
        num_blocks=first.num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        prefix_caching=config.enable_prefix_caching,
        pipeline_depth=first.pipeline_depth,
        predictors=predictors,
        async_scheduling=async_scheduling,
        windows=model.cache_groups.windows,
        extensions=extensions,
    )
    if scheduler.predictors:
        from nanoserve.record.forecasts import learn_from_results  # for engines that predict

        learn_from_results(scheduler)
    return scheduler


def _make_policy(config: EngineConfig, host_blocks: int = 0) -> Policy:
    """The one asked for; with host memory, one that knows nothing of it preempts by swaps where
    that is cheaper."""
    swaps = host_blocks > 0 and config.decode_layout is None
    return make_policy(config.policy_name, config.max_num_batched_tokens, swaps=swaps)


def _default_params(defaults: SamplingDefaults, resolved: ResolvedModel) -> SamplingParams:
    named = {field: getattr(defaults, field) for field in defaults.__slots__}
    try:
        return SamplingParams(**{name: value for name, value in named.items() if value is not None})
    except UsageError as error:  # not the user's doing
        raise ModelError(f"{resolved.directory}/generation_config.json: {error}") from error
