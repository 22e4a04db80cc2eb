"""Makes a worker: in each parallel layout its place among the others, its part of the model, its KV
cache."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.cpu_attention.host_processor import HostProcessor, default_host_threads
from nanoserve.executor.kv_transfer.host_pool import HostPool, check_within_reach
from nanoserve.executor.profiling.measuring_speeds import measure_speeds
from nanoserve.executor.profiling.start_profile import StartingEngine, hybrid_profile
from nanoserve.executor.stage import Stage
from nanoserve.executor.start.device_start import DeviceStart
from nanoserve.executor.start.memory import available_memory, memory_errors
from nanoserve.executor.start.model_loading import (
    load_decoder,
    load_layouts,
    read_config,
    usable_device,
    with_cache_groups,
)
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.executor.workers.distributed import (
    Activations,
    RankGroup,
    join_workers,
    leave_workers,
)
from nanoserve.executor.workers.endpoint import WorkerEndpoint
from nanoserve.executor.workers.messages import Allocate, Hello, Loaded, Loading, Ready, WorkerStart
from nanoserve.executor.workers.worker import Worker, WorkerLayout
from nanoserve.models.decoder import Decoder, DecoderLayer, RMSNorm
from nanoserve.models.hub import ProgressCallback
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import shards_of_layouts
from nanoserve.scheduler.windows import most_tokens
from nanoserve.utils.sizes import format_size
from nanoserve.utils.threads import cores_in_use


def work(start: WorkerStart, endpoint: WorkerEndpoint) -> NoReturn:
    """Meet the other workers, load this one's part, make the KV cache as large as the engine says,
    and serve. When another worker is lost, meet all again and go on. Raises NanoserveError if the
    model or the device cannot be used, or memory does not suffice; torch's RuntimeError if the
    other workers cannot be reached."""
    config = start.config
    device = usable_device(config.device if config.device == "cpu" else f"cuda:{start.local_rank}")
    if start.host_pool is not None:
        check_within_reach(Path(start.host_pool[0]))
    processor = _set_apart(start, device) if config.attends_on_host else None
    model = with_cache_groups(read_config(start.model, config.quantization, config.device), config)
    everyone = join_workers(
        start.rank, config.num_workers, start.init_method, device, headers=config.attends_on_host
    )

    def progress(stage: str, done: int, total: int) -> None:
        endpoint.report(Loading(start.rank, stage, done, total))

    decoders, weights = _load(start, model, progress, everyone, device)
    device_start = DeviceStart(start.model, config, decoders, device, in_worker=True)
    reserved, speeds = device_start.reserved_bytes(), None
    if not start.again and (
        start.host_pool is not None or config.pipeline_parallel > 1 or config.speculate is not None
    ):  # policies and speculation ask how long swaps and steps take
        speeds = measure_speeds(device, decoders[0].dtype, everyone, config.num_workers)
    del everyone  # who holds a group cannot leave it
    loaded = Loaded(
        start.rank,
        memory=f"{socket.gethostname()} {device}",
        block_bytes=device_start.block_bytes,
        free_bytes=max(0, available_memory(device) - reserved),
        speeds=speeds,
        state_bytes=device_start.state_bytes,
    )
    endpoint.report(loaded)
    allocate = endpoint.hear()
    assert isinstance(allocate, Allocate), "nothing else can be said to a worker without a cache"
    storage = _cache_storage(device_start, allocate.num_blocks, device)
    pool = _open_host_pool(start, model, decoders[0].dtype)
    stages = device_start.stages(
        allocate.num_blocks, pool, processor, storage, state_slots=allocate.state_slots
    )
    layouts = [_worker_layout(stage, config) for stage in stages]
    for layout in layouts:
        layout.activations.connect()
    _capture(config, device_start, stages, allocate.num_blocks, progress)
    profile = None
    if start.profiles and start.rank == 0:
        assert speeds is not None, "only policies that attend in host memory ask for it"
        assert processor is not None, "likewise"
        measured = StartingEngine(
            stage=as_whole_stage(stages[0], storage, config.block_size),
            config=config,
            model=model,
            speeds=speeds,
            processor=processor,
        )
        profile = hybrid_profile(measured, progress)
    while True:
        worker = Worker(start, endpoint, layouts, weights)
        endpoint.report(Ready(start.rank, profile))
        start = worker.run()
        del worker  # and with it what was on its way
        _rejoin(start, endpoint, layouts, loaded)


def _cache_storage(
    device_start: DeviceStart, num_blocks: Sequence[int], device: torch.device
) -> Tensor:
    """Memory in which the KV cache of each layout is laid out."""
    sizes = zip(num_blocks, device_start.block_bytes, strict=True)
    size = max(blocks * (each - device_start.drafter_bytes) for blocks, each in sizes)
    problem = f"a KV cache of {format_size(size)} does not fit"
    with memory_errors(device, problem, "lower --kv-cache-memory"), torch.inference_mode():
        return torch.empty(size, dtype=torch.uint8, device=device)


def _capture(
    config: EngineConfig,
    device_start: DeviceStart,
    stages: Sequence[Stage],
    num_blocks: Sequence[int],
    progress: ProgressCallback,
) -> None:
    """Have a GPU replay decode steps, in each layout. All ranks of a stage call this together. A
    worker on a CPU has no GpuStart, and captures nothing."""
    for gpu, stage, blocks in zip(device_start.gpus, stages, num_blocks, strict=False):
        model = stage.runner.config
        most = config.max_model_len or model.max_position_embeddings
        longest = most_tokens(model.cache_groups.windows, blocks, config.block_size, most)
        gpu.capture(stage.runner, longest, progress)


def _open_host_pool(start: WorkerStart, model: ModelConfig, dtype: torch.dtype) -> HostPool | None:
    """Open the host tier's memory, which all workers share; None without a host tier."""
    if start.host_pool is None:
        return None
    path, blocks = start.host_pool
    block_size = start.config.block_size
    return HostPool.open(Path(path), model, num_blocks=blocks, block_size=block_size, dtype=dtype)


def _rejoin(
    start: WorkerStart, endpoint: WorkerEndpoint, layouts: Sequence[WorkerLayout], loaded: Loaded
) -> None:
    """Leave the other workers, and meet them and the new one as in the beginning, but with what is
    here already."""
    decoders = [layout.stage.runner.decoder for layout in layouts]
    for layout, decoder in zip(layouts, decoders, strict=True):
        layout.stage.forget()
        layout.activations.forget()
        decoder.set_group(None)
    leave_workers()
    endpoint.move(start)
    endpoint.introduce(Hello(start.rank))
    config, device = start.config, decoders[0].device
    everyone = join_workers(
        start.rank, config.num_workers, start.init_method, device, headers=config.attends_on_host
    )
    for decoder in decoders:
        decoder.set_group(everyone.split(decoder.shard))
    endpoint.report(loaded)
    endpoint.hear()  # Allocate: of the cache's size, which is the same in every life
    for layout in layouts:
        layout.activations.connect()


def _set_apart(start: WorkerStart, device: torch.device) -> HostProcessor:
    """This worker's part of the cores that attend, and of the others if its device is the CPU.

    All workers are on one machine, since they share the host pool.
    """
    config = start.config
    workers = config.num_workers * config.data_parallel
    threads = (config.host_threads or default_host_threads(device.type)) // workers
    # Before any thread computes: else threads that attend for one stage would get cores on which
    # another one computes.
    if hasattr(os, "sched_setaffinity"):
        own = part_of(cores_in_use(), start.local_rank, workers)
        os.sched_setaffinity(0, {processor for core in own for processor in core})
    return HostProcessor.set_apart(max(1, threads), device)


def _load(
    start: WorkerStart,
    model: ModelConfig,
    progress: ProgressCallback,
    everyone: RankGroup,
    device: torch.device,
) -> tuple[Sequence[Decoder], ReshardableWeights | None]:
    """The worker's decoders by layout, that of the layout to begin in filled; and the weights of
    all layouts, None where there is one."""
    config = start.config
    shards = [of_layout[start.rank] for of_layout in shards_of_layouts(model, config)]
    # all of them now: a change of layout makes none
    groups = [everyone.split(shard) for shard in shards]
    arguments = (start.model, config, device, progress)
    if len(shards) == 1:
        return [load_decoder(*arguments, shard=shards[0], group=groups[0])[0]], None
    weights = load_layouts(*arguments, shards=shards, groups=groups)
    if start.layout != 0:
        weights.fill(start.layout)
    return weights.decoders, weights


def _worker_layout(stage: Stage, config: EngineConfig) -> WorkerLayout:
    decoder = stage.runner.decoder
    activations = Activations(
        decoder.shard,
        hidden_size=decoder.config.hidden_size,
        num_tokens=config.max_num_batched_tokens,
        dtype=decoder.dtype,
        device=stage.runner.device,
    )
    return WorkerLayout(decoder.shard, stage, activations)


def part_of(
    cores: Sequence[tuple[int, ...]], number: int, workers: int
) -> Sequence[tuple[int, ...]]:
    """The cores of one of the workers of this machine: equal parts but for one core; more workers
    than cores share."""
    if workers > len(cores):
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // workers : (number + 1) * len(cores) // workers]


def as_whole_stage(stage: Stage, storage: Tensor, block_size: int) -> Stage:
    """A first stage that can be measured as if its layers were a model, over the storage of its own
    cache."""
    runner = ModelRunner(
        as_whole_model(stage.runner.decoder),
        num_blocks=len(stage.runner.caches.keys[0]),
        block_size=block_size,
        device=stage.runner.device,
        run_layer=stage.layers or DecoderLayer.__call__,
        storage=storage,
    )
    return Stage(runner, layers=stage.layers)


def as_whole_model(stage: Decoder) -> Decoder:
    """The layers of a first stage as a model of its own, which answers nonsense. It takes no
    further memory."""
    config = stage.config
    with torch.device("meta"):
        whole = Decoder(config, initialize=False)
    whole.embedding, whole.rotary, whole.layers = stage.embedding, stage.rotary, stage.layers
    whole.final_norm = RMSNorm(config.hidden_size, config.norms.eps).to(stage.device, stage.dtype)
    whole.lm_head.weight = nn.Parameter(stage.embedding.weight.detach(), requires_grad=False)
    return whole.eval()
