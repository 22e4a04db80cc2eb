"""Makes a worker: its place among the others, its part of the model, its KV cache."""

import socket
from pathlib import Path

import torch

from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.shards import make_shards
from nanoserve.runtime.compiled_layers import CompiledLayers
from nanoserve.runtime.devices import usable_device
from nanoserve.runtime.gpu_start import GpuStart
from nanoserve.runtime.memory import available_memory, kv_bytes_per_block, memory_errors
from nanoserve.runtime.model_loading import load_decoder, read_config
from nanoserve.runtime.model_runner import ModelRunner
from nanoserve.runtime.workers.activations import Activations
from nanoserve.runtime.workers.messages import Allocate, Loaded, Loading, Ready, WorkerStart
from nanoserve.runtime.workers.ranks import Ranks, meet
from nanoserve.runtime.workers.station import Station
from nanoserve.runtime.workers.worker import Worker
from nanoserve.sizes import format_size
from triton_ops.cpu import cpu_operators


def build_worker(start: WorkerStart, station: Station) -> Worker:
    """Meet the other workers, load this one's part, and make the KV cache as large as the engine says.

    Raises:
        NanoserveError: if the model or the device cannot be used, or memory does not suffice.
        RuntimeError: torch's, if the other workers cannot be reached.
    """
    config = start.config
    ranks = Ranks(start.rank, config.pipeline_parallel, config.tensor_parallel)
    device = usable_device(config.device if config.device == "cpu" else f"cuda:{start.local_rank}")
    decoder, longest = _load(start, station, ranks, device)
    gpu = GpuStart(decoder, config, device) if device.type == "cuda" else None
    reserved = 0 if gpu is None else gpu.measure(longest, None)
    block_bytes = kv_bytes_per_block(decoder.config, config.block_size, decoder.dtype)
    memory = f"{socket.gethostname()} {device}"
    station.report(Loaded(ranks.rank, memory, block_bytes, max(0, available_memory(device) - reserved)))
    allocate = station.hear()
    assert isinstance(allocate, Allocate), "nothing else can be said to a worker without a cache"
    operators = cpu_operators() if gpu is None else None
    layers = None
    if operators is not None and not config.eager and ranks.degree == 1:
        layers = CompiledLayers(decoder, block_size=config.block_size, operators=operators)
    plain = DecoderLayer.__call__ if gpu is None else gpu.run_layer
    runner = _make_runner(start, decoder, allocate.num_blocks, device, plain if layers is None else layers)
    activations = Activations(
        ranks,
        hidden_size=decoder.config.hidden_size,
        num_tokens=config.max_num_batched_tokens,
        dtype=decoder.dtype,
        device=device,
    )
    worker = Worker(
        station,
        ranks,
        runner,
        activations,
        layers=layers,
        built=[built for built in (operators, layers) if built is not None],
        coupled=start.coupled,
        observe_times=start.observe_times,
    )
    station.report(Ready(ranks.rank))
    return worker


def _make_runner(
    start: WorkerStart, decoder: Decoder, num_blocks: int, device: torch.device, run_layer: LayerFunction
) -> ModelRunner:
    block_size = start.config.block_size
    size = format_size(num_blocks * kv_bytes_per_block(decoder.config, block_size, decoder.dtype))
    with memory_errors(device, f"a KV cache of {size} does not fit", "lower --kv-cache-memory"):
        return ModelRunner(
            decoder,
            num_blocks=num_blocks,
            block_size=block_size,
            device=device,
            run_layer=run_layer,
            grammars=GrammarCompiler(Path(start.tokenizer_directory), decoder.config.vocab_size),
        )


def _load(start: WorkerStart, station: Station, ranks: Ranks, device: torch.device) -> tuple[Decoder, int]:
    """The worker's part of the decoder, and how long a sequence may be at most."""
    config = start.config
    directory = None if start.model_directory is None else Path(start.model_directory)
    resolved = ResolvedModel(start.name, directory, Path(start.tokenizer_directory))
    shards = make_shards(
        read_config(resolved),
        pipeline_parallel=config.pipeline_parallel,
        tensor_parallel=config.tensor_parallel,
        pipeline_split=config.pipeline_split,
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL takes the one that is set
    group = meet(ranks, start.init_method, device)
    decoder, model = load_decoder(
        resolved,
        config,
        device,
        lambda stage, done, total: station.report(Loading(start.rank, stage, done, total)),
        shard=shards[start.rank],
        group=group,
    )
    return decoder, config.max_model_len or model.max_position_embeddings
