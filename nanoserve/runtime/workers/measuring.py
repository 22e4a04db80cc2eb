"""What a worker does that measures layouts: at each tensor degree its shard of some layers, while all others do it."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import NoReturn

import torch
import torch.distributed as dist

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Precision, tensor_degrees
from nanoserve.costs.layout_profile import LAYOUT_SCHEMA, DegreeTimes, LayoutProfile
from nanoserve.engine_config import EngineConfig
from nanoserve.models.decoder import DecoderLayer
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.shards import Shard
from nanoserve.runtime.launch.measuring_speeds import measure_speeds
from nanoserve.runtime.launch.memory import available_memory
from nanoserve.runtime.launch.model_loading import load_decoder, read_config, usable_device
from nanoserve.runtime.profiling.parts import Point, Samples, curve_of, difference_of, grid_of
from nanoserve.runtime.profiling.timers import KvRegions, StepTimer, attention_seconds
from nanoserve.runtime.stage import compiled_layers
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.runtime.workers.distributed import RankGroup, join_workers
from nanoserve.runtime.workers.messages import Answered, Ready, RunPlan, WorkerStart
from nanoserve.runtime.workers.process import WorkerEndpoint
from nanoserve.scheduler.plan import Answer, StepResult
from triton_ops.cpu import cpu_operators

_TOKENS = (1, 4, 16, 64, 256)
_PROMPTS = (16, 128, 256, 512, 1024)
_BATCHES, _CONTEXTS = (1, 8, 32), (16, 128, 512)
_ROWS = (1, 8, 32)
_SENT = (2**12, 2**16, 2**20)
_MOST_BYTES = 2**29  # of a shard's layers; more would be read no slower
_KV_BYTES = 2**27
_SECONDS = 4.0  # for all rounds at all degrees; one round is taken in any case
_LONGEST = 0.4  # seconds of a sample: if a size takes longer, larger ones are extrapolated

_Probes = Mapping[str, Mapping[Point, Callable[[], float | None]]]  # a worker that only takes part answers None


def measure(start: WorkerStart, endpoint: WorkerEndpoint) -> NoReturn:
    """Meet the other workers, measure with them, report, and from then on answer plans at once, for the time that a
    message takes. Raises NanoserveError as `work` does."""
    config, devices = start.config, start.config.num_workers
    device, model = usable_device(config.device), read_config(start.resolved, config.quantization)
    everyone = join_workers(start.rank, devices, start.init_method, device)
    cpu_operators().load()
    dtype = resolve_dtype(config.dtype, device, model.dtype)
    degrees = [degree for degree in tensor_degrees(model) if devices % degree == 0]
    memory = available_memory(device) / 2 / devices
    speeds, sent = measure_speeds(device, dtype, everyone, devices), None
    if devices > 1:
        sends: _Probes = {"send": {(size,): partial(_send_seconds, start.rank, devices, size) for size in _SENT}}
        sent = curve_of(_take(sends, 0.2)["send"]).undisturbed().rising()
    probes, built = dict[str, Mapping[Point, Callable[[], float | None]]](), cpu_operators().loaded
    for degree in degrees:  # in turn, so that a busy moment spoils one round of all
        found, compiled = _degree_probes(start, model, degree, everyone)
        probes |= {f"T{degree} {name}": points for name, points in found.items()}
        built = built and compiled
    samples = _take(probes, _SECONDS)
    profile = LayoutProfile(
        schema=LAYOUT_SCHEMA,
        devices=devices,
        bits=8 * dtype.itemsize,
        memory_bytes=memory,
        speeds=speeds,
        send=sent,
        step=curve_of(samples["T1 inputs"]).undisturbed().rising(),
        degrees={degree: _degree_times(samples, degree) for degree in degrees},
        built=built,
    )
    endpoint.report(Ready(start.rank, layouts=profile))
    while True:
        if isinstance(message := endpoint.hear(), RunPlan):
            answers = tuple(Answer(row.sequence, (0,)) for row in message.plan.rows)
            endpoint.report(Answered(StepResult(message.plan.step, answers)))


def _degree_probes(start: WorkerStart, model: ModelConfig, degree: int, everyone: RankGroup) -> tuple[_Probes, bool]:
    """Probes of a shard of this degree, and whether its layers run compiled, if ever they do."""
    config, devices, device = start.config, start.config.num_workers, usable_device(start.config.device)
    shard = Shard(_some_layers(model, config, degree), rank=start.rank % degree, degree=degree)
    place = Shard(shard.layers, start.rank // degree, devices // degree, shard.rank, degree)
    decoder, _ = load_decoder(start.resolved, config, device, None, shard=shard, group=everyone.split(place))
    layers, size = compiled_layers(decoder.eval(), config), config.block_size
    run_layer = layers or DecoderLayer.__call__
    blocks = max(_TOKENS[-1] // size, max(_ROWS))
    runner = ModelRunner(decoder, num_blocks=blocks, block_size=size, device=device, run_layer=run_layer)
    steps = StepTimer(runner, block_size=size)
    cells = [*product(_BATCHES, _CONTEXTS), (1, _PROMPTS[-1]), (blocks, size)]
    regions = KvRegions(
        decoder.config, cells, block_size=size, dtype=decoder.dtype, device=device, most_bytes=_KV_BYTES
    )
    attend = partial(attention_seconds, decoder.config, regions)

    def lone_seconds(tokens: int) -> float | None:
        return steps.pass_seconds(tokens) if place.is_first else None

    return (
        {
            "layer": {(tokens,): partial(steps.pass_seconds, tokens) for tokens in _TOKENS},
            "lone": {(tokens,): partial(lone_seconds, tokens) for tokens in (_TOKENS if place.num_stages > 1 else ())},
            "its attention": {(tokens,): partial(attend, *steps.attention_shape(tokens)) for tokens in _TOKENS},
            "decode attention": {cell: partial(attend, cell[0], 1, cell[1]) for cell in product(_BATCHES, _CONTEXTS)},
            "prefill attention": {(tokens,): partial(attend, 1, tokens, tokens) for tokens in _PROMPTS},
            "inputs": {(rows,): partial(steps.inputs_seconds, rows) for rows in _ROWS},
            "head": {(rows,): partial(steps.head_seconds, rows) for rows in _ROWS},
        },
        layers is None or layers.loaded,
    )


def _some_layers(model: ModelConfig, config: EngineConfig, degree: int) -> range:
    """As many as a worker has at this degree, so that caches keep as much of them as in a run, if they are not huge."""
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    counts = ModelCounts(model, precision=Precision.of(8 * dtype.itemsize))
    most = int(_MOST_BYTES * degree * model.num_layers / counts.stage_weight_bytes(0))
    return range(max(1, min(model.num_layers * degree // config.num_workers, most)))


def _degree_times(samples: Samples, degree: int) -> DegreeTimes:
    samples = {name.removeprefix(f"T{degree} "): points for name, points in samples.items()}
    attention = samples["its attention"]
    return DegreeTimes(
        layer=difference_of(samples["layer"], attention).undisturbed().rising(),
        lone=difference_of(samples["lone"], attention).undisturbed().rising() if samples["lone"] else None,
        decode_attention=grid_of(samples["decode attention"]).undisturbed().rising(),
        prefill_attention=curve_of(samples["prefill attention"]).undisturbed().rising(),
        head=curve_of(samples["head"]).undisturbed().rising(),
    )


def _send_seconds(rank: int, devices: int, size: int) -> float | None:
    """Half the time of a message of `size` bytes to the next worker and back; workers send in pairs."""
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


def _take(probes: _Probes, seconds: float) -> Samples:
    """Sample every point in rounds, the first of which warms up. All workers begin each sample together and take the
    mean over those that computed, so that all agree about how long to go on."""
    began = time.perf_counter()
    samples: Samples = {}
    for name, points in probes.items():
        samples[name] = {}
        for point, probe in points.items():
            if _mean(probe()) > _LONGEST and len(point) == 1 < len(samples[name]):
                break
            samples[name][point] = []
    warm_up = _mean(time.perf_counter() - began)
    until, passed = warm_up + seconds, warm_up
    while passed < until or not passed > warm_up:
        for name, taken in samples.items():
            for point, found in taken.items():
                _mean(0.0)  # meet
                found.append(_mean(probes[name][point]()))
        passed = _mean(time.perf_counter() - began)
    return samples


def _mean(seconds: float | None) -> float:
    """The mean over the workers that have a number: the same in all."""
    found = torch.tensor([seconds or 0.0, seconds is not None], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found[0] / found[1])
