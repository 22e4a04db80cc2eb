"""Makes a worker: in each parallel layout its place among the others, its part of the model, its KV cache."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoserve.config import ModelConfig
from nanoserve.costs.measured_machine import MachineSpeeds
from nanoserve.engine_config import EngineConfig
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction, RMSNorm
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import shards_of_layouts
from nanoserve.processes.sizes import format_size
from nanoserve.processes.threads import cores_in_use
from nanoserve.runtime.compile.layer_runner import LayerRunner
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.launch.core_division import default_host_threads
from nanoserve.runtime.launch.devices import usable_device
from nanoserve.runtime.launch.gpu_start import GpuStart
from nanoserve.runtime.launch.measuring_speeds import measure_speeds
from nanoserve.runtime.launch.memory import available_memory, kv_bytes_per_block, memory_errors
from nanoserve.runtime.launch.model_loading import load_decoder, load_layouts, read_config
from nanoserve.runtime.launch.start_profile import StartingEngine, hybrid_profile
from nanoserve.runtime.moves.gpu_staging import staging_memory
from nanoserve.runtime.moves.host_pool import HostPool, check_within_reach
from nanoserve.runtime.stage import Stage
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.runtime.workers.activations import Activations
from nanoserve.runtime.workers.messages import Allocate, Loaded, Loading, Ready, WorkerStart
from nanoserve.runtime.workers.process import WorkerEndpoint
from nanoserve.runtime.workers.ranks import Ranks, meet
from nanoserve.runtime.workers.worker import Worker, WorkerLayout
from triton_ops.cpu import cpu_operators


def build_worker(start: WorkerStart, endpoint: WorkerEndpoint) -> Worker:
    """Meet the other workers, load this one's part, and make the KV cache as large as the engine says.

    Raises:
        NanoserveError: if the model or the device cannot be used, or memory does not suffice.
        RuntimeError: torch's, if the other workers cannot be reached.
    """
    config = start.config
    device = usable_device(config.device if config.device == "cpu" else f"cuda:{start.local_rank}")
    if start.host_pool is not None:
        check_within_reach(Path(start.host_pool[0]))
    processor = _set_apart(start, device) if config.attends_on_host else None
    loaded = _load(start, endpoint, device)
    gpus = [GpuStart(decoder, config, device) for decoder in loaded.decoders] if device.type == "cuda" else []
    longest = config.max_model_len or loaded.model.max_position_embeddings
    block_bytes = tuple(_block_bytes(decoder, config) for decoder in loaded.decoders)
    reserved = max((gpu.measure(longest, None) for gpu in gpus), default=0)
    if gpus and start.host_pool is not None:
        reserved += sum(map(staging_memory, block_bytes))
    speeds = None
    if start.host_pool is not None:
        speeds = measure_speeds(device, loaded.decoders[0].dtype, dist.group.WORLD)
    endpoint.report(
        Loaded(
            start.rank,
            memory=f"{socket.gethostname()} {device}",
            block_bytes=block_bytes,
            free_bytes=max(0, available_memory(device) - reserved),
            speeds=speeds,
        )
    )
    allocate = endpoint.hear()
    assert isinstance(allocate, Allocate), "nothing else can be said to a worker without a cache"
    storage = _make_storage(start, loaded, allocate.num_blocks, device)
    layouts = _make_layouts(start, loaded, allocate.num_blocks, storage, gpus, processor)
    for layout in layouts:
        layout.activations.connect()
    profile = None
    if start.profiles and start.rank == 0:
        assert processor is not None and speeds is not None, "only policies that attend in host memory ask for it"
        measured = starting_engine(
            layouts[0].stage.runner,
            layouts[0].stage.layers or DecoderLayer.__call__,
            storage=storage,
            processor=processor,
            config=config,
            model=loaded.model,
            speeds=speeds,
            compiled=layouts[0].stage.compiled,
        )
        profile = hybrid_profile(measured, lambda *progress: endpoint.report(Loading(start.rank, *progress)))
    worker = Worker(
        endpoint,
        layouts,
        current=start.layout,
        weights=loaded.weights,
        coupled=start.coupled,
        observe_times=start.observe_times,
    )
    endpoint.report(Ready(start.rank, profile))
    return worker


def _set_apart(start: WorkerStart, device: torch.device) -> HostProcessor:
    """This worker's part of the cores that attend, and of the others if its device is the CPU.

    All workers are on one machine, since they share the host pool.
    """
    config = start.config
    workers = config.num_workers * config.data_parallel
    threads = (config.host_threads or default_host_threads(device.type)) // workers
    keep_to_own_cores(start.local_rank, workers)
    return HostProcessor.set_apart(max(1, threads), device)


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """What a worker has of the model."""

    model: ModelConfig
    """The whole one's config."""
    ranks: list[Ranks]
    decoders: Sequence[Decoder]
    """By layout."""
    weights: ReshardableWeights | None
    """Weights of all layouts; None where there is one."""


def _load(start: WorkerStart, endpoint: WorkerEndpoint, device: torch.device) -> _LoadedModel:
    """The worker's parts of the decoder; those of the layout to begin in are filled."""
    config = start.config
    directory = None if start.model_directory is None else Path(start.model_directory)
    resolved = ResolvedModel(start.name, directory, Path(start.tokenizer_directory))
    model = read_config(resolved)
    shards = [of_layout[start.rank] for of_layout in shards_of_layouts(model, config)]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL takes the one that is set
    ranks = [Ranks(start.rank, layout.pipeline_parallel, layout.tensor_parallel) for layout in config.layouts]
    groups = meet(ranks, start.init_method, device, headers=config.attends_on_host)

    def report_progress(stage: str, done: int, total: int) -> None:
        endpoint.report(Loading(start.rank, stage, done, total))

    if len(shards) == 1:
        decoder, _ = load_decoder(resolved, config, device, report_progress, shard=shards[0], group=groups[0])
        return _LoadedModel(model, ranks, [decoder], None)
    assert directory is not None, "weights that are read more than once are in files"
    weights, _ = load_layouts(directory, config, device, report_progress, shards=shards, groups=groups)
    if start.layout != 0:
        weights.fill(start.layout)
    return _LoadedModel(model, ranks, weights.decoders, weights)


def _make_storage(
    start: WorkerStart, loaded: _LoadedModel, num_blocks: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Storage of the KV cache, which is another one in each layout: uint8, as large as the largest of them."""
    config = start.config
    sizes = [blocks * _block_bytes(one, config) for blocks, one in zip(num_blocks, loaded.decoders, strict=True)]
    problem = f"a KV cache of {format_size(max(sizes))} does not fit"
    with memory_errors(device, problem, "lower --kv-cache-memory"), torch.inference_mode():
        return torch.empty(max(sizes), dtype=torch.uint8, device=device)


def _make_layouts(
    start: WorkerStart,
    loaded: _LoadedModel,
    num_blocks: Sequence[int],
    storage: torch.Tensor,
    gpus: Sequence[GpuStart],
    processor: HostProcessor | None,
) -> list[WorkerLayout]:
    """What is made once for each layout, so that changing it makes nothing."""
    config, device = start.config, storage.device
    pool = _open_pool(start, loaded)
    layouts = list[WorkerLayout]()
    for number, (ranks, decoder) in enumerate(zip(loaded.ranks, loaded.decoders, strict=True)):
        stage = Stage.build(
            decoder,
            num_blocks=num_blocks[number],
            block_size=config.block_size,
            device=device,
            layers=gpus[number].layers if gpus else _compiled_layers(decoder, config, ranks),
            grammars=GrammarCompiler(Path(start.tokenizer_directory), decoder.config.vocab_size),
            storage=storage,
            part=None if pool is None else pool.part(decoder.shard),
            processor=processor,
        )
        activations = _activations(decoder, ranks, config, device)
        layouts.append(WorkerLayout(ranks, stage, activations))
    return layouts


def _open_pool(start: WorkerStart, loaded: _LoadedModel) -> HostPool | None:
    if start.host_pool is None:
        return None
    path, num_blocks = start.host_pool
    dtype, block_size = loaded.decoders[0].dtype, start.config.block_size
    return HostPool.open(Path(path), loaded.model, num_blocks=num_blocks, block_size=block_size, dtype=dtype)


def _compiled_layers(decoder: Decoder, config: EngineConfig, ranks: Ranks) -> LayerRunner | None:
    """None where sums over ranks stand in the way."""
    if config.eager or ranks.degree > 1:
        return None
    return LayerRunner.ahead_of_time(
        decoder, block_size=config.block_size, operators=cpu_operators(), with_pieces=config.attends_on_host
    )


def _activations(decoder: Decoder, ranks: Ranks, config: EngineConfig, device: torch.device) -> Activations:
    return Activations(
        ranks,
        hidden_size=decoder.config.hidden_size,
        num_tokens=config.max_num_batched_tokens,
        dtype=decoder.dtype,
        device=device,
    )


def _block_bytes(decoder: Decoder, config: EngineConfig) -> int:
    return kv_bytes_per_block(decoder.config, config.block_size, decoder.dtype)


def keep_to_own_cores(number: int, workers: int) -> None:
    """Have this process run on its part of the cores, before it starts any thread that computes.

    Else threads that attend for one stage would be given the cores on which another one computes.

    Args:
        number: which of the workers of this machine it is.
        workers: how many there are.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {processor for core in part_of(cores_in_use(), number, workers) for processor in core})


def part_of(cores: Sequence[tuple[int, ...]], number: int, workers: int) -> Sequence[tuple[int, ...]]:
    """Cores in a row, as many for each as for the others but for one; with more workers than cores, some share one."""
    if workers > len(cores):
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // workers : (number + 1) * len(cores) // workers]


def starting_engine(
    stage: ModelRunner,
    run_layer: LayerFunction,
    *,
    storage: Tensor,
    processor: HostProcessor,
    config: EngineConfig,
    model: ModelConfig,
    speeds: MachineSpeeds,
    compiled: bool,
) -> StartingEngine:
    """The first stage as an engine that can be measured, over the cache that the stage will have.

    Args:
        run_layer: runs the stage's layers.
        storage: of its cache.
        model: the whole one.
        speeds, compiled: as in StartingEngine.
    """
    block_size, num_blocks = config.block_size, len(stage.caches.keys[0])
    whole = as_whole_model(stage.decoder)
    return StartingEngine(
        runner=ModelRunner(
            whole,
            num_blocks=num_blocks,
            block_size=block_size,
            device=stage.device,
            run_layer=run_layer,
            storage=storage,
        ),
        processor=processor,
        config=config,
        max_model_len=min(config.max_model_len or model.max_position_embeddings, num_blocks * block_size),
        speeds=speeds,
        compiled=compiled,
        whole_model=model,
    )


def as_whole_model(stage: Decoder) -> Decoder:
    """The layers of a first stage as a model of its own, which answers nonsense. It takes no further memory."""
    config = stage.config
    with torch.device("meta"):
        whole = Decoder(config, initialize=False)
    whole.embedding, whole.rotary, whole.layers = stage.embedding, stage.rotary, stage.layers
    whole.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps).to(stage.device, stage.dtype)
    whole.lm_head.weight = nn.Parameter(stage.embedding.weight.detach(), requires_grad=False)
    return whole.eval()
