"""Samples of many points, taken round by round, and curves made of them. No torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid

Point = tuple[int, ...]
"""The size or sizes at which something is timed."""
Probes = Mapping[str, Mapping[Point, Callable[[], float]]]
"""Functions that take one sample in seconds, by what they time and by point."""
Samples = dict[str, dict[Point, list[float]]]

_MOST_REPEATS = 8
_SMALLEST = 1e-9
"""A difference of two measured times is no less than this."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    seconds: float
    """Time for all samples, the warm-up included."""
    fewest_rounds: int
    most_rounds: int
    """Bounds for the number of rounds, whatever they take. A point that no round reaches keeps its warm-up's sample."""
    longest_sample: float
    """Seconds. If a size takes longer, larger ones are not measured."""
    repeat_seconds: float = 0.0
    """Points that take less are sampled a few times within a round, until this much time has passed."""


def take_rounds(probes: Probes, announce: Callable[[str], None], effort: Effort) -> Samples:
    """Sample every point once a round, so that a busy moment spoils one sample of many points and no point as a whole.

    Args:
        probes: the first call of each is a warm-up and does not count, unless there is no time for a second.
        announce: takes a line about each round.
    """
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
        if len(point) == 1 and len(kept) > 1 and time.perf_counter() - began > longest:
            break
    return kept


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of an action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def curve_of(samples: Mapping[Point, Sequence[float]]) -> MeasuredCurve:
    """Medians and quartiles over one size."""
    low, seconds, high = zip(*(quartiles(found) for found in samples.values()), strict=True)
    return MeasuredCurve(sizes=tuple(size for (size,) in samples), seconds=seconds, low=low, high=high)


def difference_of(samples: Mapping[Point, Sequence[float]], less: Mapping[Point, Sequence[float]]) -> MeasuredCurve:
    """The curve of ``samples`` minus ``less``, a small part of them. The least of ``less`` counts: it has no noise."""
    curve = curve_of(samples)
    part = [min(less[size,]) for size in curve.sizes]

    def without(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(_SMALLEST, value - own) for value, own in zip(values, part, strict=True))

    return MeasuredCurve(
        sizes=curve.sizes, seconds=without(curve.seconds), low=without(curve.low), high=without(curve.high)
    )


def grid_of(samples: Mapping[Point, Sequence[float]]) -> MeasuredGrid:
    """Medians and quartiles over batch and context."""
    batches = tuple(dict.fromkeys(batch for batch, _ in samples))
    contexts = tuple(dict.fromkeys(context for _, context in samples))
    rows = [tuple(zip(*(quartiles(samples[batch, context]) for context in contexts), strict=True)) for batch in batches]
    low, seconds, high = zip(*rows, strict=True)
    return MeasuredGrid(batches=batches, contexts=contexts, seconds=seconds, low=low, high=high)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Low, median, high; one sample is all three."""
    if len(samples) == 1:
        return (samples[0],) * 3
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high
