"""Samples of many points, taken round by round, and curves made of them. No torch."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from nanoserve.costs.curves import Curve, Grid

Point = tuple[int, ...]
"""The size, or the sizes, at which something is timed."""
Probes = Mapping[str, Mapping[Point, Callable[[], float]]]
"""What is timed, at which points: each call takes one sample in seconds."""
Samples = dict[str, dict[Point, list[float]]]

FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
LONGEST_SAMPLE = 1.0
"""Seconds. Larger sizes than one that takes longer are not measured."""
_SMALLEST = 1e-9
"""A difference of two measured times is no less than this."""


def take_rounds(probes: Probes, announce: Callable[[str], None], seconds: float) -> Samples:
    """Every point once a round, so that a busy moment spoils a little of everything and nothing whole.

    Args:
        probes: the first call of each is a warm-up and does not count.
        announce: is told of each round in a line.
        seconds: rounds begin until so much time has passed, but ``FEWEST_ROUNDS`` at least.
    """
    announce("warming up ...")
    began = time.perf_counter()
    probes = {name: _within_reason(points) for name, points in probes.items()}
    samples: Samples = {name: {point: [] for point in points} for name, points in probes.items()}
    for number in range(1, MOST_ROUNDS + 1):
        passed = time.perf_counter() - began
        if number > FEWEST_ROUNDS and passed > seconds:
            break
        announce(f"measuring, round {number} after {passed:.0f} s")
        for name, points in probes.items():
            for point, probe in points.items():
                samples[name][point].append(probe())
    return samples


def _within_reason(points: Mapping[Point, Callable[[], float]]) -> Mapping[Point, Callable[[], float]]:
    """Warm up; on a curve, what is larger than the first size that took too long is left out: the last line goes on."""
    kept: dict[Point, Callable[[], float]] = {}
    for point, probe in points.items():
        began = time.perf_counter()
        probe()
        kept[point] = probe
        if len(point) == 1 and len(kept) > 1 and time.perf_counter() - began > LONGEST_SAMPLE:
            break
    return kept


def curve_of(samples: Mapping[Point, Sequence[float]]) -> Curve:
    """Medians and quartiles over one size."""
    low, seconds, high = zip(*(_quartiles(found) for found in samples.values()), strict=True)
    return Curve(sizes=tuple(size for (size,) in samples), seconds=seconds, low=low, high=high)


def difference_of(samples: Mapping[Point, Sequence[float]], less: Mapping[Point, Sequence[float]]) -> Curve:
    """The curve of ``samples`` without ``less``, a small part of them, of which the least counts: it has no noise."""
    curve = curve_of(samples)
    part = [min(less[size,]) for size in curve.sizes]

    def without(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(_SMALLEST, value - own) for value, own in zip(values, part, strict=True))

    return Curve(sizes=curve.sizes, seconds=without(curve.seconds), low=without(curve.low), high=without(curve.high))


def grid_of(samples: Mapping[Point, Sequence[float]]) -> Grid:
    """Medians and quartiles over batch and context."""
    batches = tuple(dict.fromkeys(batch for batch, _ in samples))
    contexts = tuple(dict.fromkeys(context for _, context in samples))
    rows = [
        tuple(zip(*(_quartiles(samples[batch, context]) for context in contexts), strict=True)) for batch in batches
    ]
    low, seconds, high = zip(*rows, strict=True)
    return Grid(batches=batches, contexts=contexts, seconds=seconds, low=low, high=high)


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high
