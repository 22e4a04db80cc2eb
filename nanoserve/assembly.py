"""Put a model and an engine together: LLM does so in its own process, a server in its engine process."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.config import EngineConfig, ModelConfig, SamplingDefaults
from nanoserve.engine import Engine
from nanoserve.errors import ModelError, UsageError
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.models.shards import make_shards
from nanoserve.request import SamplingParams
from nanoserve.runtime.compiled_layers import CompiledLayers
from nanoserve.runtime.devices import usable_device
from nanoserve.runtime.gpu_start import GpuFacts, GpuStart
from nanoserve.runtime.local import LocalExecutor
from nanoserve.runtime.memory import choose_num_blocks
from nanoserve.runtime.model_loading import load_decoder, read_config
from nanoserve.runtime.traced_executor import TracedExecutor
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.scheduler import Scheduler
from triton_ops.cpu import CpuOperators, cpu_operators

if TYPE_CHECKING:
    from nanoserve.runtime.workers.executor import RemoteLayers


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and what its users need to know of its model.

    Attributes:
        max_model_len: longest sequence in tokens that the engine takes.
        default_params: what the model's generation_config.json recommends.
        operators, layers: what is built in the background and makes steps faster; None where nothing is.
        gpu: what getting the GPU ready took; None without one.
    """

    engine: Engine
    model: ModelConfig
    max_model_len: int
    default_params: SamplingParams
    operators: CpuOperators | None
    layers: "CompiledLayers | RemoteLayers | None"
    gpu: GpuFacts | None


def build_engine(
    resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None = None
) -> BuiltEngine:
    """Load the weights and put cache, executor and scheduler around them; the caller closes the engine.

    Raises:
        ModelError: if the model cannot be used.
        UsageError: if a setting makes no sense for it.
        RuntimeFailure: if the memory does not suffice, or the trace cannot be written.
    """
    model = read_config(resolved)
    default_params = _default_params(model.sampling_defaults)
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise UsageError(f"--max-model-len {config.max_model_len} is beyond the model's own limit of {longest}")
    build = _build_here if config.num_workers == 1 else _build_on_workers
    if config.trace is None:
        return build(resolved, config, progress, default_params)
    with ExitStack() as failing:
        file = failing.enter_context(ChromeTraceFile(Path(config.trace)))  # told at once if it cannot be written
        built = build(resolved, config, progress, default_params)
        engine = built.engine
        engine.executor = TracedExecutor(engine.executor, file, tensor_parallel=config.tensor_parallel)
        failing.pop_all()  # the executor closes it
    return built


def _build_here(
    resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None, default_params: SamplingParams
) -> BuiltEngine:
    """On one device, in this process."""
    device = usable_device(config.device)
    decoder, model = load_decoder(resolved, config, device, progress)
    gpu = GpuStart(decoder, config, device) if device.type == "cuda" else None
    num_blocks = _choose_num_blocks(decoder, model, config, gpu, progress)
    max_model_len = min(config.max_model_len or model.max_position_embeddings, num_blocks * config.block_size)
    operators = cpu_operators() if gpu is None else None
    layers: CompiledLayers | None = None
    if operators is not None and not config.eager:
        layers = CompiledLayers(decoder, block_size=config.block_size, operators=operators)
    executor = LocalExecutor(
        decoder,
        model,
        num_blocks=num_blocks,
        block_size=config.block_size,
        device=device,
        layers=layers,
        run_layer=DecoderLayer.__call__ if gpu is None else gpu.run_layer,
        grammars=GrammarCompiler(resolved.tokenizer_directory, model.vocab_size),
        feeds_tokens=gpu is not None and not config.eager,
    )
    facts = None if gpu is None else gpu.capture(executor.runner, max_model_len, progress)
    scheduler = _make_scheduler(config, num_blocks, max_model_len, feeds_tokens=executor.feeds_tokens)
    engine = Engine(scheduler, executor, vocab_size=model.vocab_size)
    return BuiltEngine(engine, model, max_model_len, default_params, operators, layers, facts)


def _build_on_workers(
    resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None, default_params: SamplingParams
) -> BuiltEngine:
    """On several devices, each with a process of its own."""
    from nanoserve.runtime.workers.executor import WorkersExecutor  # which needs ZeroMQ; one device does not

    model = read_config(resolved)
    make_shards(  # what cannot be divided is refused before any process is started
        model,
        pipeline_parallel=config.pipeline_parallel,
        tensor_parallel=config.tensor_parallel,
        pipeline_split=config.pipeline_split,
    )
    make_policy(config.policy, config.max_num_batched_tokens)  # likewise
    longest = model.max_position_embeddings
    executor = WorkersExecutor(
        resolved, config, longest=longest, progress=progress, observe_times=config.trace is not None
    )
    max_model_len = min(config.max_model_len or longest, executor.num_blocks * config.block_size)
    scheduler = _make_scheduler(config, executor.num_blocks, max_model_len, feeds_tokens=False)
    engine = Engine(scheduler, executor, vocab_size=model.vocab_size)
    return BuiltEngine(engine, model, max_model_len, default_params, None, executor.layers, None)


def _choose_num_blocks(
    decoder: Decoder,
    model: ModelConfig,
    config: EngineConfig,
    gpu: GpuStart | None,
    progress: ProgressCallback | None,
) -> int:
    longest = model.max_position_embeddings
    reserved = 0 if gpu is None else gpu.measure(config.max_model_len or longest, progress)
    return choose_num_blocks(
        model,
        block_size=config.block_size,
        dtype=decoder.dtype,
        device=decoder.device,
        kv_cache_memory=config.kv_cache_memory,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        reserved=reserved,
    )


def _make_scheduler(config: EngineConfig, num_blocks: int, max_model_len: int, *, feeds_tokens: bool) -> Scheduler:
    return Scheduler(
        make_policy(config.policy, config.max_num_batched_tokens),
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        prefix_caching=config.enable_prefix_caching,
        pipeline_depth=config.pipeline_parallel,
        feeds_tokens=feeds_tokens,
    )


def _default_params(defaults: SamplingDefaults) -> SamplingParams:
    named = {field: getattr(defaults, field) for field in defaults.__slots__}
    try:
        return SamplingParams(**{name: value for name, value in named.items() if value is not None})
    except UsageError as error:  # not the user's doing
        raise ModelError(f"generation_config.json of the model: {error}") from error
