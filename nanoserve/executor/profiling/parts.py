"""Probes for all parts of a step, samples taken round by round, and curves made of them (as APEX's
profiler)."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

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
    # both hold whatever rounds take. A point that no round reaches keeps its warm-up's sample
    most_rounds: int
    longest_sample: float  # seconds. If a size takes longer, larger ones are not measured
    # faster points are sampled a few times in a round, until this much time has passed
    repeat_seconds: float = 0.0


def take_rounds(
    probes: Probes,
    announce: Callable[[str], None],
    effort: Effort,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Sample every point once a round, so that a busy moment spoils one sample of many points and
    no point as a whole. The first call of each probe is a warm-up, which does not count unless
    there is no time for a second. Workers that measure together agree on a ``clock``, and with it
    on what is sampled next."""
    announce("warming up ...")
    began = clock()
    first: dict[tuple[str, Point], float] = {}
    for name, points in probes.items():
        for point, seconds in _within_reason(points, effort.longest_sample, clock).items():
            first[name, point] = seconds
    taken: dict[tuple[str, Point], list[float]] = {turn: [] for turn in first}
    for number in range(1, effort.most_rounds + 1):
        passed = clock() - began
        each = passed / number  # the warm-up counts as a round
        rounds_left = effort.fewest_rounds - number + 1
        left = max(effort.seconds - passed, rounds_left * each)
        announce(f"measuring, round {number}, about {left:.0f} s left")
        for name, point in first:
            if number > effort.fewest_rounds and clock() - began > effort.seconds:
                break
            taken[name, point] += _repeated(probes[name][point], effort.repeat_seconds, clock)
    samples: Samples = {name: {} for name in probes}
    for (name, point), found in taken.items():
        if not found:
            found.append(first[name, point])
        samples[name][point] = found
    return samples


def _repeated(probe: Probe, seconds: float, clock: Callable[[], float]) -> list[float]:
    until = clock() + seconds
    samples = [probe()]
    while len(samples) < _MOST_REPEATS and clock() < until:
        samples.append(probe())
    return samples


def _within_reason(
    points: Mapping[Point, Probe], longest: float, clock: Callable[[], float]
) -> dict[Point, float]:
    """Warm up. A curve ends at the first size that takes too long; its last line is
    extrapolated."""
    kept: dict[Point, float] = {}
    for point, probe in points.items():
        began = clock()
        kept[point] = probe()
        is_curve = len(point) == 1
        if is_curve and len(kept) > 1 and clock() - began > longest:
            break
    return kept


def curve_of(samples: Sampled) -> MeasuredCurve:
    sizes, low, seconds, high = [], [], [], []
    for (size,), found in samples.items():
        quartiles = _quartiles(found)
        sizes.append(size)
        low.append(quartiles.low)
        seconds.append(quartiles.median)
        high.append(quartiles.high)
    return MeasuredCurve(
        sizes=tuple(sizes), seconds=tuple(seconds), low=tuple(low), high=tuple(high)
    )


def difference_of(samples: Sampled, less: Sampled) -> MeasuredCurve:
    """The curve of ``samples`` minus ``less``, a small part of them. The least of ``less`` counts:
    it has no noise."""
    curve = curve_of(samples)
    part = [min(less[size,]) for size in curve.sizes]
    times = {}
    for name, seconds in curve.times.items():
        difference = np.maximum(_SMALLEST, np.subtract(seconds, part))
        times[name] = tuple(difference.tolist())
    return MeasuredCurve(sizes=curve.sizes, **times)


def grid_of(samples: Sampled) -> MeasuredGrid:
    batches = tuple(dict.fromkeys(batch for batch, _ in samples))
    contexts = tuple(dict.fromkeys(context for _, context in samples))
    low, seconds, high = [], [], []
    for batch in batches:
        row = [_quartiles(samples[batch, context]) for context in contexts]
        low.append(tuple(quartiles.low for quartiles in row))
        seconds.append(tuple(quartiles.median for quartiles in row))
        high.append(tuple(quartiles.high for quartiles in row))
    return MeasuredGrid(
        batches=batches, contexts=contexts, seconds=tuple(seconds), low=tuple(low), high=tuple(high)
    )


class _Quartiles(NamedTuple):
    low: float
    median: float
    high: float


def _quartiles(samples: Sequence[float]) -> _Quartiles:
    """Low, median, high; one sample is all three."""
    low, median, high = np.percentile(samples, (25, 50, 75)).tolist()
    return _Quartiles(low, median, high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSizes:
    """The sizes at which the parts of a step are timed; ascending, two or more of each."""

    tokens: tuple[int, ...]  # of a step, for its layers
    prompts: tuple[int, ...]  # of one prompt, for its attention
    batches: tuple[int, ...]
    # sequences, and keys of each, for decode attention on the device and in host memory
    contexts: tuple[int, ...]
    rows: tuple[int, ...]  # rows of a step, for its inputs, logits and scheduling
    copies: tuple[int, ...]  # bytes of copies between device and host memory
    # bytes of keys and values that attention is timed over, on the device and in host memory each
    kv_bytes: int

    def within(self, runner: ModelRunner, config: EngineConfig, *, context: int) -> "ProfileSizes":
        """The sizes that an engine with this context reaches, with the KV cache of its runner, and
        its largest batch within ``kv_bytes``. Raises UsageError if it does not allow two of
        each."""
        blocks = len(runner.caches.keys[0])
        step_tokens = min(config.max_num_batched_tokens, blocks * config.block_size)
        step_rows = min(config.max_num_seqs, blocks, step_tokens)
        longest_prompt = min(context, step_tokens)
        token_bytes = runner.config.kv_numbers * runner.decoder.dtype.itemsize
        fitting = self.kv_bytes // (self.batches[-1] * token_bytes)
        longest_context = max(2, min(context, fitting))
        return replace(
            self,
            tokens=_up_to(self.tokens, step_tokens),
            prompts=_up_to(self.prompts, longest_prompt),
            contexts=_up_to(self.contexts, longest_context),
            rows=_up_to(self.rows, step_rows),
        )


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The sizes up to the limit; half of it and all of it if fewer than two remain."""
    if limit < 2:
        raise UsageError("an engine whose steps hold one token, or one row, cannot be profiled")
    found = tuple(size for size in sizes if size <= limit)
    if len(found) < 2:
        return (limit // 2, limit)
    return found


def kv_regions(steps: StepTimer, sizes: ProfileSizes, device: torch.device) -> KvRegions:
    """Keys and values with room for every attention that is timed at these sizes."""
    decoder = steps.runner.decoder
    calls = [(sizes.batches[-1], sizes.contexts[-1]), (1, sizes.prompts[-1])]
    for tokens in sizes.tokens:
        rows, _, keys = steps.attention_shape(tokens)
        calls.append((rows, keys))
    return KvRegions(
        decoder.config,
        calls,
        block_size=steps.block_size,
        dtype=decoder.dtype,
        device=device,
        most_bytes=sizes.kv_bytes,
    )


def device_probes(steps: StepTimer, sizes: ProfileSizes) -> dict[str, Mapping[Point, Probe]]:
    """Probes for what a device does in a step; of the steps' runner only the KV cache's content
    changes."""
    regions = kv_regions(steps, sizes, steps.runner.device)
    attention = partial(attention_seconds, steps.runner.config, regions)

    def layer_attention(tokens: int) -> float:
        return attention(*steps.attention_shape(tokens))

    def decode_attention(batch: int, context: int) -> float:
        return attention(batch, 1, context)

    def prefill_attention(tokens: int) -> float:
        return attention(1, tokens, tokens)

    return {
        "layer": over(steps.layer_seconds, sizes.tokens),
        "its attention": over(layer_attention, sizes.tokens),
        "decode_attention": over(decode_attention, sizes.batches, sizes.contexts),
        "prefill_attention": over(prefill_attention, sizes.prompts),
        "inputs": over(steps.inputs_seconds, sizes.rows),
        "head": over(steps.head_seconds, sizes.rows),
    }


@contextmanager
def open_probes(
    runner: ModelRunner, processor: HostProcessor, sizes: ProfileSizes, *, block_size: int
) -> Iterator[dict[str, Mapping[Point, Probe]]]:
    """``device_probes`` for an idle runner, and probes for attention in host memory and for
    copies."""
    cpu = torch.device("cpu")
    steps = StepTimer(runner, block_size=block_size)
    shares_memory = processor.confines_device
    keep_busy: Callable[[], object] = partial(time.sleep, 1e-4)
    if shares_memory:
        keep_busy = linear_pieces(runner.decoder)
    on_host = kv_regions(steps, sizes, cpu)
    host = HostAttentionTimer(
        runner.config, on_host, processor, device=runner.device, keep_busy=keep_busy
    )

    def exchange(batch: int) -> float:
        return host.seconds(batch, 1)

    try:
        probes = device_probes(steps, sizes)
        probes["host_attention"] = over(host.seconds, sizes.batches, sizes.contexts)
        probes["host_exchange"] = over(exchange, sizes.batches)
        probes["copy"] = {(size,): copy_probe(size, runner.device) for size in sizes.copies}
        if shares_memory:
            batch, context = sizes.batches[-1], sizes.contexts[-1]
            probes["alone"] = {(batch, context): partial(Stopwatch(cpu).seconds, keep_busy)}
            probes["beside host"] = {(batch, context): partial(host.device_seconds, batch, context)}
        yield probes
    finally:
        host.close()
        steps.close()


def profile_of(
    found: Samples,
    runner: ModelRunner,
    processor: HostProcessor,
    *,
    block_size: int,
    settings: Any,
    **fields: Any,
) -> Profile:
    """A profile without factors, from samples of these parts. Call it from the thread that
    computes."""
    first_copies = next(iter(found["copy"].values()))
    measured = {"host_threads": processor.threads, "rounds": len(first_copies)}
    rows = [number for (number,) in found["head"]]
    kv_blocks = len(runner.caches.keys[0])
    most_slower = processor.threads / torch.get_num_threads() + 1
    return Profile(
        settings={**settings, **measured},
        model=runner.config,
        bits=8 * runner.decoder.dtype.itemsize,
        memory=KvMemory(kv_tokens=kv_blocks * block_size),
        beside_host=beside_host(found, most_slower),
        linear=difference_of(found["layer"], found["its attention"]),
        decode_attention=grid_of(found["decode_attention"]),
        prefill_attention=curve_of(found["prefill_attention"]),
        host_attention=grid_of(found["host_attention"]),
        host_exchange=curve_of(found["host_exchange"]),
        copy=curve_of(found["copy"]),
        inputs=curve_of(found["inputs"]),
        head=curve_of(found["head"]),
        engine=curve_of(_scheduling(runner.decoder, rows)),
        **fields,
    )


def _scheduling(decoder: Decoder, rows: Iterable[int]) -> Sampled:
    """Seconds of scheduling a step between two passes through the layers: much of a small model's
    step."""
    compute_piece = linear_pieces(decoder)

    def compute() -> None:
        for _ in decoder.layers:
            compute_piece()

    found: dict[Point, list[float]] = {}
    for number in rows:
        steps = measure_scheduler(
            number, context=_SCHEDULED_CONTEXT, steps=_SCHEDULED_STEPS, compute=compute
        )
        found[number,] = [sum(parts) for parts in steps]
    return found


def beside_host(found: Samples, most: float) -> float:
    """The factor by which the device slows down while the host attends; 1 if they do not share the
    CPU's memory. A factor above ``most``, threads of both over those of the device, comes from
    other programs."""
    if "beside host" not in found:
        return 1.0
    (beside,) = found["beside host"].values()
    (alone,) = found["alone"].values()
    slower = _quartiles(beside).low / _quartiles(alone).low
    return min(max(1.0, slower), most)


def over(sample: Callable[..., float], *axes: Sequence[int]) -> dict[Point, Probe]:
    """The sample at every combination of sizes."""
    return {point: partial(sample, *point) for point in product(*axes)}
