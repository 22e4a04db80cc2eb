"""Probes for all parts of a step, samples taken round by round, and curves made of them (as APEX's profiler)."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.profile import SCHEMA, KvMemory, Profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.profiling.timers import (
    HostAttentionTimer,
    KvRegions,
    StepTimer,
    Stopwatch,
    attention_seconds,
    copy_probe,
    linear_pieces,
)
from nanoserve.runtime.step.model_runner import ModelRunner

Point = tuple[int, ...]  # the size or sizes at which something is timed
Probes = Mapping[str, Mapping[Point, Callable[[], float]]]
"""Functions that take one sample in seconds, by what they time and by point."""
Sampled = Mapping[Point, Sequence[float]]
Samples = dict[str, dict[Point, list[float]]]

_MOST_REPEATS = 8
_SMALLEST = 1e-9  # a difference of two measured times is no less than this


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    seconds: float  # time for all samples, the warm-up included
    fewest_rounds: int
    most_rounds: int  # both hold whatever rounds take. A point that no round reaches keeps its warm-up's sample
    longest_sample: float  # seconds. If a size takes longer, larger ones are not measured
    repeat_seconds: float = 0.0
    """Points that take less are sampled a few times within a round, until this much time has passed."""


def take_rounds(probes: Probes, announce: Callable[[str], None], effort: Effort) -> Samples:
    """Sample every point once a round, so that a busy moment spoils one sample of many points and no point as a whole.
    The first call of each probe is a warm-up, which does not count unless there is no time for a second."""
    announce("warming up ...")
    began = time.perf_counter()
    first = {name: _within_reason(points, effort.longest_sample) for name, points in probes.items()}
    samples: Samples = {name: {point: [] for point in points} for name, points in first.items()}
    turns = [(name, point) for name, points in first.items() for point in points]
    for number in range(1, effort.most_rounds + 1):
        passed = time.perf_counter() - began
        left = max(effort.seconds - passed, (effort.fewest_rounds - number + 1) * passed / number)  # warm-up and rounds
        announce(f"measuring, round {number}, about {left:.0f} s left")
        for name, point in turns:
            if number > effort.fewest_rounds and time.perf_counter() - began > effort.seconds:
                break
            samples[name][point] += _repeated(probes[name][point], effort.repeat_seconds)
    return {
        name: {point: samples[name][point] or [seconds] for point, seconds in points.items()}
        for name, points in first.items()
    }


def _repeated(probe: Callable[[], float], seconds: float) -> list[float]:
    until, samples = time.perf_counter() + seconds, [probe()]
    while len(samples) < _MOST_REPEATS and time.perf_counter() < until:
        samples.append(probe())
    return samples


def _within_reason(points: Mapping[Point, Callable[[], float]], longest: float) -> dict[Point, float]:
    """Warm up. A curve ends at the first size that takes too long; its last line is extrapolated."""
    kept: dict[Point, float] = {}
    for point, probe in points.items():
        began = time.perf_counter()
        kept[point] = probe()
        if len(point) == 1 < len(kept) and time.perf_counter() - began > longest:
            break
    return kept


def curve_of(samples: Sampled) -> MeasuredCurve:
    """Medians and quartiles over one size."""
    low, seconds, high = zip(*map(_quartiles, samples.values()), strict=True)
    return MeasuredCurve(sizes=tuple(size for (size,) in samples), seconds=seconds, low=low, high=high)


def difference_of(samples: Sampled, less: Sampled) -> MeasuredCurve:
    """The curve of ``samples`` minus ``less``, a small part of them. The least of ``less`` counts: it has no noise."""
    curve = curve_of(samples)
    part = [min(less[size,]) for size in curve.sizes]
    times = {name: np.maximum(_SMALLEST, np.subtract(one, part)) for name, one in curve.times.items()}
    return MeasuredCurve(sizes=curve.sizes, **{name: tuple(one.tolist()) for name, one in times.items()})


def grid_of(samples: Sampled) -> MeasuredGrid:
    """Medians and quartiles over batch and context."""
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

    def within(self, runner: ModelRunner, config: EngineConfig, *, rows: int, context: int) -> "ProfileSizes":
        """The sizes that an engine with at most these rows in a step and this context reaches, with the KV cache of its
        runner, and its largest batch within ``kv_bytes``. Raises UsageError if it does not allow two of each."""
        shape, blocks = runner.config, len(runner.caches.keys[0])
        step_tokens = min(config.max_num_batched_tokens, blocks * config.block_size)
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * runner.decoder.dtype.itemsize
        fitting = self.kv_bytes // (self.batches[-1] * token_bytes)
        return replace(
            self,
            tokens=_up_to(self.tokens, step_tokens),
            prompts=_up_to(self.prompts, min(context, step_tokens)),
            contexts=_up_to(self.contexts, max(2, min(context, fitting))),
            rows=_up_to(self.rows, min(rows, blocks, step_tokens)),
        )


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes up to the limit; half of it and all of it if fewer than two remain."""
    if limit < 2:
        raise UsageError("an engine whose steps hold one token, or one row, cannot be profiled")
    found = tuple(size for size in sizes if size <= limit)
    return found if len(found) > 1 else (limit // 2, limit)


@contextmanager
def open_probes(
    runner: ModelRunner, processor: HostProcessor, sizes: ProfileSizes, *, block_size: int
) -> Iterator[dict[str, Mapping[Point, Callable[[], float]]]]:
    """Probes for an idle runner, and for the part of the CPU that attends in host memory. Of the runner only the
    content of the KV cache changes. See ``ProfileSizes.within``."""
    config, device = runner.config, runner.device
    steps = StepTimer(runner, block_size=block_size)
    cells, largest = (sizes.batches, sizes.contexts), (sizes.batches[-1], sizes.contexts[-1])
    calls = [(rows, keys) for rows, _, keys in map(steps.attention_shape, sizes.tokens)]
    regions = partial(
        KvRegions,
        config,
        [largest, (1, sizes.prompts[-1]), *calls],
        block_size=block_size,
        dtype=runner.decoder.dtype,
        most_bytes=sizes.kv_bytes,
    )
    attention = partial(attention_seconds, config, regions(device=device))
    shares_memory = processor.confines_device
    keep_busy = linear_pieces(runner.decoder) if shares_memory else lambda: time.sleep(1e-4)
    host = HostAttentionTimer(
        config, regions(device=torch.device("cpu")), processor, device=device, keep_busy=keep_busy
    )
    try:
        probes: dict[str, Mapping[Point, Callable[[], float]]] = {
            "layer": _over(steps.layer_seconds, sizes.tokens),
            "its attention": _over(lambda tokens: attention(*steps.attention_shape(tokens)), sizes.tokens),
            "decode_attention": _over(lambda batch, context: attention(batch, 1, context), *cells),
            "prefill_attention": _over(lambda tokens: attention(1, tokens, tokens), sizes.prompts),
            "host_attention": _over(host.seconds, *cells),
            "host_exchange": _over(lambda batch: host.seconds(batch, 1), sizes.batches),
            "inputs": _over(steps.inputs_seconds, sizes.rows),
            "head": _over(steps.head_seconds, sizes.rows),
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
    names = ("host_exchange", "prefill_attention", "copy", "inputs", "head", "engine")
    curves: dict[str, Any] = {name: curve_of(found[name]) for name in names}
    curves |= {name: grid_of(found[name]) for name in ("decode_attention", "host_attention")}
    measured = {"host_threads": processor.threads, "rounds": len(next(iter(found["copy"].values())))}
    return Profile(
        schema=SCHEMA,
        settings={**settings, **measured},
        model=runner.config,
        bits=8 * runner.decoder.dtype.itemsize,
        memory=KvMemory(kv_tokens=len(runner.caches.keys[0]) * block_size),
        beside_host=beside_host(found, processor.threads / torch.get_num_threads() + 1),
        linear=difference_of(found["layer"], found["its attention"]),
        **curves,
        **fields,
    )


def beside_host(found: Samples, most: float) -> float:
    """The factor by which the device slows down while the host attends; 1 if they do not share the CPU's memory.

    They share its bandwidth by threads: more than ``most``, threads of both over the device's, is others' doing.
    """
    if "beside host" not in found:
        return 1.0
    (beside,), (alone,) = found["beside host"].values(), found["alone"].values()
    return min(max(1.0, _quartiles(beside)[0] / _quartiles(alone)[0]), most)


def _over(sample: Callable[..., float], *axes: Sequence[int]) -> dict[Point, Callable[[], float]]:
    """The sample at every combination of sizes."""
    return {point: partial(sample, *point) for point in product(*axes)}
