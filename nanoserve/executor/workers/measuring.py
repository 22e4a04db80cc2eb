"""Measuring layouts in a worker: at each tensor degree it runs its shard of some layers, while all
other workers do so."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.layout_profile import DegreeTimes, LayoutProfile
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.profiling.measuring_speeds import measure_speeds
from nanoserve.executor.profiling.parts import (
    Effort,
    Point,
    Probe,
    ProfileSizes,
    Samples,
    curve_of,
    device_probes,
    difference_of,
    grid_of,
    over,
    take_rounds,
)
from nanoserve.executor.profiling.timers import StepTimer
from nanoserve.executor.stage import compiled_layers
from nanoserve.executor.start.memory import available_memory
from nanoserve.executor.start.model_loading import load_decoder, read_config, usable_device
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.executor.workers.distributed import RankGroup, join_workers
from nanoserve.executor.workers.endpoint import WorkerEndpoint
from nanoserve.executor.workers.messages import Answered, Ready, RunPlan, WorkerStart
from nanoserve.layout import tensor_degrees
from nanoserve.models.decoder import DecoderLayer, LayerFunction
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.shards import Shard
from nanoserve.scheduler.plan import Answer, StepResult
from triton_ops.cpu import cpu_operators

_SIZES = ProfileSizes(
    tokens=(1, 3, 4, 8, 16, 64, 256),
    prompts=(16, 128, 256, 512, 1024),
    batches=(1, 8, 32),
    contexts=(16, 128, 512),
    rows=(1, 3, 4, 8, 32),
    copies=(),
    kv_bytes=2**27,
)
_EFFORT = Effort(seconds=10.0, fewest_rounds=1, most_rounds=100, longest_sample=1.0)
_SENT = (2**12, 2**16, 2**20)
_MOST_BYTES = 2**28  # of a shard's layers; more would be read no slower


def measure(start: WorkerStart, endpoint: WorkerEndpoint) -> NoReturn:
    """Meet the other workers, measure with them, report, and from then on answer plans at once, for
    the time that a message takes. Raises NanoserveError as `work` does."""
    config, devices = start.config, start.config.num_workers
    device = usable_device(config.device)
    model = read_config(start.model, config.quantization, config.device)
    everyone = join_workers(start.rank, devices, start.init_method, device)
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    degrees = [degree for degree in tensor_degrees(model) if devices % degree == 0]
    memory = available_memory(device) / 2 / devices
    speeds = measure_speeds(device, dtype, everyone, devices)
    probes: dict[str, Mapping[Point, Probe]] = {}
    built = cpu_operators().loaded
    if devices > 1:
        send_seconds = partial(_send_seconds, start.rank, devices)
        probes["send"] = over(_together(send_seconds), _SENT)
    for degree in degrees:  # in turn, so that a busy moment spoils one round of all
        found, compiled = _degree_probes(start, model, degree, everyone)
        for name, points in found.items():
            probes[f"T{degree} {name}"] = points
        built = built and compiled
    samples = take_rounds(probes, lambda _: None, _EFFORT, lambda: _mean(time.perf_counter()))
    send = None
    if devices > 1:
        send = curve_of(samples["send"]).undisturbed().rising()
    profile = LayoutProfile(
        devices=devices,
        bits=8 * dtype.itemsize,
        memory_bytes=memory,
        speeds=speeds,
        send=send,
        step=curve_of(samples["T1 inputs"]).undisturbed().rising(),
        degrees={degree: _degree_times(samples, f"T{degree}") for degree in degrees},
        built=built,
    )
    endpoint.report(Ready(start.rank, layouts=profile))
    while True:
        message = endpoint.hear()
        if isinstance(message, RunPlan):
            answers = tuple(Answer(row.sequence, (0,)) for row in message.plan.rows)
            result = StepResult(message.plan.step, answers)
            endpoint.report(Answered(result))


def _degree_probes(
    start: WorkerStart, model: ModelConfig, degree: int, everyone: RankGroup
) -> tuple[Mapping[str, Mapping[Point, Probe]], bool]:
    """Probes of a shard of this degree, and whether its layers run compiled, if ever they do."""
    config, device = start.config, usable_device(start.config.device)
    stage, rank = divmod(start.rank, degree)
    shard = Shard(_some_layers(model, config, degree), rank=rank, degree=degree)
    place = Shard(shard.layers, stage, config.num_workers // degree, rank, degree)
    decoder, _ = load_decoder(
        start.model, config, device, None, shard=shard, group=everyone.split(place)
    )
    layers, size = compiled_layers(decoder.eval(), config), config.block_size
    run_layer: LayerFunction = DecoderLayer.__call__
    if layers is not None:
        run_layer = layers
    blocks = max(_SIZES.tokens[-1] // size, *_SIZES.rows)
    runner = ModelRunner(
        decoder, num_blocks=blocks, block_size=size, device=device, run_layer=run_layer
    )
    steps = StepTimer(runner, block_size=size)
    probes = device_probes(steps, _SIZES)
    probes["layer"] = over(steps.pass_seconds, _SIZES.tokens)
    if degree > 1:  # the inputs are those of one rank
        del probes["inputs"]
    together: dict[str, Mapping[Point, Probe]] = {}
    for name, points in probes.items():
        together[name] = {point: _together(probe) for point, probe in points.items()}
    if place.num_stages > 1:
        lone: Callable[[int], float | None] = _computes_nothing
        if place.is_first:
            lone = steps.pass_seconds
        together["lone"] = over(_together(lone), _SIZES.tokens)
    return together, layers is None or layers.loaded


def _computes_nothing(_: int) -> float | None:
    """A sample on a worker of a later stage, which waits while the first stage computes alone."""
    return None


def _some_layers(model: ModelConfig, config: EngineConfig, degree: int) -> range:
    """Choose as many layers as a worker has at this degree, unless their weights are huge: caches
    then keep as much of them as in a run."""
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    counts = ModelCounts(model, precision=Precision.of(8 * dtype.itemsize))
    most = int(_MOST_BYTES * degree * model.num_layers / counts.stage_weight_bytes(0))
    of_worker = model.num_layers * degree // config.num_workers
    return range(max(1, min(of_worker, most)))


def _degree_times(samples: Samples, degree: str) -> DegreeTimes:
    attention = samples[f"{degree} its attention"]
    lone = None
    if f"{degree} lone" in samples:
        lone = difference_of(samples[f"{degree} lone"], attention).undisturbed().rising()
    return DegreeTimes(
        layer=difference_of(samples[f"{degree} layer"], attention).undisturbed().rising(),
        lone=lone,
        decode_attention=grid_of(samples[f"{degree} decode_attention"]).undisturbed().rising(),
        prefill_attention=curve_of(samples[f"{degree} prefill_attention"]).undisturbed().rising(),
        head=curve_of(samples[f"{degree} head"]).undisturbed().rising(),
    )


def _send_seconds(rank: int, devices: int, size: int) -> float | None:
    """Half the time of a message of `size` bytes to the next worker and back; workers send in
    pairs."""
    message, peer = torch.ones(size, dtype=torch.uint8), rank ^ 1
    if peer >= devices:
        return None
    if rank > peer:
        dist.recv(message, peer)
        dist.send(message, peer)
        return None
    began = time.perf_counter()
    dist.send(message, peer)
    dist.recv(message, peer)
    return (time.perf_counter() - began) / 2


def _together(probe: Callable[..., float | None]) -> Callable[..., float]:
    """Samples that all workers begin at the same time. Each worker gets the mean over the workers
    that computed."""

    def sample(*sizes: int) -> float:
        _mean(0.0)  # meet
        return _mean(probe(*sizes))

    return sample


def _mean(seconds: float | None) -> float:
    """The mean over the workers that have a number: the same in all, so that they agree about how
    long to go on."""
    sum_and_count = [0.0, 0.0]
    if seconds is not None:
        sum_and_count = [seconds, 1.0]
    found = torch.tensor(sum_and_count, dtype=torch.float64)
    dist.all_reduce(found)
    return float(found[0] / found[1])
