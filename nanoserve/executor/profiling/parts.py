"""Probes for all parts of a step, samples taken round by round, and curves made of them (as APEX's profiler)."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.profile import KvMemory, Profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.profiling.scheduler_cost import measure_scheduler
from nanoserve.executor.profiling.timers import (
    HostAttentionTimer,
    KvRegions,
    StepTimer,
    Stopwatch,
    attention_seconds,
    copy_probe,
    linear_pieces,
)
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.models.decoder import Decoder

Point = tuple[int, ...]  # the size or sizes at which something is timed
Probe = Callable[[], float]  # takes one sample, in seconds
Probes = Mapping[str, Mapping[Point, Probe]]
Sampled = Mapping[Point, Sequence[float]]
Samples = dict[str, dict[Point, list[float]]]

_MOST_REPEATS = 8
_SCHEDULED_CONTEXT, _SCHEDULED_STEPS = 16, 10
_SMALLEST = 1e-9  # a difference of two measured times is no less than this


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    seconds: float  # time for all samples, the warm-up included
    fewest_rounds: int
    most_rounds: int  # both hold whatever rounds take. A point that no round reaches keeps its warm-up's sample
    longest_sample: float  # seconds. If a size takes longer, larger ones are not measured
    repeat_seconds: float = 0.0  # faster points are sampled a few times in a round, until this much time has passed


def take_rounds(
    probes: Probes, announce: Callable[[str], None], effort: Effort, clock: Callable[[], float] = time.perf_counter
) -> Samples:
    """Sample every point once a round, so that a busy moment spoils one sample of many points and no point as a whole.
    The first call of each probe is a warm-up, which does not count unless there is no time for a second. Workers that
    measure together agree on a ``clock``, and with it on what is sampled next."""
    announce("warming up ...")
    began = clock()
    first = {name: _within_reason(points, effort.longest_sample, clock) for name, points in probes.items()}
    samples: Samples = {name: {point: [] for point in points} for name, points in first.items()}
    turns = [(name, point) for name, points in first.items() for point in points]
    for number in range(1, effort.most_rounds + 1):
        passed = clock() - began
        left = max(effort.seconds - passed, (effort.fewest_rounds - number + 1) * passed / number)  # warm-up and rounds
        announce(f"measuring, round {number}, about {left:.0f} s left")
        for name, point in turns:
            if number > effort.fewest_rounds and clock() - began > effort.seconds:
                break
            samples[name][point] += _repeated(probes[name][point], effort.repeat_seconds, clock)
    return {
        name: {point: samples[name][point] or [seconds] for point, seconds in points.items()}
        for name, points in first.items()
    }


def _repeated(probe: Probe, seconds: float, clock: Callable[[], float]) -> list[float]:
    until, samples = clock() + seconds, [probe()]
    while len(samples) < _MOST_REPEATS and clock() < until:
        samples.append(probe())
    return samples


def _within_reason(points: Mapping[Point, Probe], longest: float, clock: Callable[[], float]) -> dict[Point, float]:
    """Warm up. A curve ends at the first size that takes too long; its last line is extrapolated."""
    kept: dict[Point, float] = {}
    for point, probe in points.items():
        began = clock()
        kept[point] = probe()
        if len(point) == 1 < len(kept) and clock() - began > longest:
            break
    return kept


def curve_of(samples: Sampled) -> MeasuredCurve:
    low, seconds, high = zip(*map(_quartiles, samples.values()), strict=True)
    return MeasuredCurve(sizes=tuple(size for (size,) in samples), seconds=seconds, low=low, high=high)


def difference_of(samples: Sampled, less: Sampled) -> MeasuredCurve:
    """The curve of ``samples`` minus ``less``, a small part of them. The least of ``less`` counts: it has no noise."""
    curve = curve_of(samples)
    part = [min(less[size,]) for size in curve.sizes]
    times = {name: np.maximum(_SMALLEST, np.subtract(one, part)) for name, one in curve.times.items()}
    return MeasuredCurve(sizes=curve.sizes, **{name: tuple(one.tolist()) for name, one in times.items()})


def grid_of(samples: Sampled) -> MeasuredGrid:
    batches, contexts = (tuple(dict.fromkeys(sizes)) for sizes in zip(*samples, strict=True))
    found = zip(*map(_quartiles, samples.values()), strict=True)
    low, seconds, high = (tuple(zip(*[iter(values)] * len(contexts), strict=True)) for values in found)
    return MeasuredGrid(batches=batches, contexts=contexts, seconds=seconds, low=low, high=high)


def _quartiles(samples: Sequence[float]) -> list[float]:
    """Low, median, high; one sample is all three."""
    return list(map(float, np.percentile(samples, (25, 50, 75))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """The sizes at which the parts of a step are timed; ascending, two or more of each."""

    tokens: tuple[int, ...]  # of a step, for its layers
    prompts: tuple[int, ...]  # of one prompt, for its attention
    batches: tuple[int, ...]
    contexts: tuple[int, ...]  # sequences, and keys of each, for decode attention on the device and in host memory
    rows: tuple[int, ...]  # rows of a step, for its inputs, logits and scheduling
    copies: tuple[int, ...]  # bytes of copies between device and host memory
    kv_bytes: int  # bytes of keys and values that attention is timed over, on the device and in host memory each

    def within(self, runner: ModelRunner, config: EngineConfig, *, context: int) -> "ProfileSizes":
        """The sizes that an engine with this context reaches, with the KV cache of its runner, and its largest batch
        within ``kv_bytes``. Raises UsageError if it does not allow two of each."""
        shape, blocks = runner.config, len(runner.caches.keys[0])
        step_tokens = min(config.max_num_batched_tokens, blocks * config.block_size)
        token_bytes = shape.kv_numbers * runner.decoder.dtype.itemsize
        fitting = self.kv_bytes // (self.batches[-1] * token_bytes)
        return replace(
            self,
            tokens=_up_to(self.tokens, step_tokens),
            prompts=_up_to(self.prompts, min(context, step_tokens)),
            contexts=_up_to(self.contexts, max(2, min(context, fitting))),
            rows=_up_to(self.rows, min(config.max_num_seqs, blocks, step_tokens)),
        )


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes up to the limit; half of it and all of it if fewer than two remain."""
    if limit < 2:
        raise UsageError("an engine whose steps hold one token, or one row, cannot be profiled")
    found = tuple(size for size in sizes if size <= limit)
    return found if len(found) > 1 else (limit // 2, limit)


def kv_regions(steps: StepTimer, sizes: ProfileSizes, device: torch.device) -> KvRegions:
    """Keys and values with room for every attention that is timed at these sizes."""
    decoder = steps.runner.decoder
    largest = [(sizes.batches[-1], sizes.contexts[-1]), (1, sizes.prompts[-1])]
    calls = [(rows, keys) for rows, _, keys in map(steps.attention_shape, sizes.tokens)]
    options: dict[str, Any] = {"dtype": decoder.dtype, "device": device, "most_bytes": sizes.kv_bytes}
    return KvRegions(decoder.config, [*largest, *calls], block_size=steps.block_size, **options)


def device_probes(steps: StepTimer, sizes: ProfileSizes) -> dict[str, Mapping[Point, Probe]]:
    """Probes for what a device does in a step; of the steps' runner only the KV cache's content changes."""
    device = steps.runner.device
    attention = partial(attention_seconds, steps.runner.config, kv_regions(steps, sizes, device))
    return {
        "layer": over(steps.layer_seconds, sizes.tokens),
        "its attention": over(lambda tokens: attention(*steps.attention_shape(tokens)), sizes.tokens),
        "decode_attention": over(lambda batch, context: attention(batch, 1, context), sizes.batches, sizes.contexts),
        "prefill_attention": over(lambda tokens: attention(1, tokens, tokens), sizes.prompts),
        "inputs": over(steps.inputs_seconds, sizes.rows),
        "head": over(steps.head_seconds, sizes.rows),
    }


@contextmanager
def open_probes(
    runner: ModelRunner, processor: HostProcessor, sizes: ProfileSizes, *, block_size: int
) -> Iterator[dict[str, Mapping[Point, Probe]]]:
    """``device_probes`` for an idle runner, and probes for attention in host memory and for copies."""
    steps, device, largest = (
        StepTimer(runner, block_size=block_size),
        runner.device,
        (sizes.batches[-1], sizes.contexts[-1]),
    )
    shares_memory = processor.confines_device
    keep_busy = linear_pieces(runner.decoder) if shares_memory else lambda: time.sleep(1e-4)
    on_host = kv_regions(steps, sizes, torch.device("cpu"))
    host = HostAttentionTimer(runner.config, on_host, processor, device=device, keep_busy=keep_busy)
    try:
        probes = device_probes(steps, sizes) | {
            "host_attention": over(host.seconds, sizes.batches, sizes.contexts),
            "host_exchange": over(lambda batch: host.seconds(batch, 1), sizes.batches),
            "copy": {(size,): copy_probe(size, device) for size in sizes.copies},
        }
        if shares_memory:
            probes["alone"] = {largest: partial(Stopwatch(torch.device("cpu")).seconds, keep_busy)}
            probes["beside host"] = {largest: partial(host.device_seconds, *largest)}
        yield probes
    finally:
        host.close()
        steps.close()


def profile_of(
    found: Samples, runner: ModelRunner, processor: HostProcessor, *, block_size: int, settings: Any, **fields: Any
) -> Profile:
    """A profile without factors, from samples of these parts. Call it from the thread that computes."""
    names = ("host_exchange", "prefill_attention", "copy", "inputs", "head")
    curves: dict[str, Any] = {name: curve_of(found[name]) for name in names}
    curves["engine"] = curve_of(_scheduling(runner.decoder, [rows for (rows,) in found["head"]]))
    curves |= {name: grid_of(found[name]) for name in ("decode_attention", "host_attention")}
    measured = {"host_threads": processor.threads, "rounds": len(next(iter(found["copy"].values())))}
    return Profile(
        settings={**settings, **measured},
        model=runner.config,
        bits=8 * runner.decoder.dtype.itemsize,
        memory=KvMemory(kv_tokens=len(runner.caches.keys[0]) * block_size),
        beside_host=beside_host(found, processor.threads / torch.get_num_threads() + 1),
        linear=difference_of(found["layer"], found["its attention"]),
        **curves,
        **fields,
    )


def _scheduling(decoder: Decoder, rows: Iterable[int]) -> Sampled:
    """Seconds of scheduling a step between two passes through the layers: much of a small model's step."""
    compute_piece = linear_pieces(decoder)

    def compute() -> None:
        for _ in decoder.layers:
            compute_piece()

    scheduled = partial(measure_scheduler, context=_SCHEDULED_CONTEXT, steps=_SCHEDULED_STEPS, compute=compute)
    return {(number,): [*map(sum, scheduled(number))] for number in rows}


def beside_host(found: Samples, most: float) -> float:
    """The factor by which the device slows down while the host attends; 1 if they do not share the CPU's memory. A
    factor above ``most``, threads of both over those of the device, comes from other programs."""
    if "beside host" not in found:
        return 1.0
    (beside,), (alone,) = found["beside host"].values(), found["alone"].values()
    return min(max(1.0, _quartiles(beside)[0] / _quartiles(alone)[0]), most)


def over(sample: Callable[..., float], *axes: Sequence[int]) -> dict[Point, Probe]:
    """The sample at every combination of sizes."""
    return {point: partial(sample, *point) for point in product(*axes)}
