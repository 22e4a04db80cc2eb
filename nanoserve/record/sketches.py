"""Many values in memory that does not grow with their number: sketches of distributions, and
thinned curves."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Generic, Self, TypeVar

from nanoserve.record.metrics import Distribution

Value = TypeVar("Value")

_LOG_RESOLUTION = math.log(1.01)  # percentiles are right to half a percent
_SMALLEST = 1e-9
_KEPT_POINTS = 1000


class Sketch:
    """Many positive values in brief: count, mean, deviation and ends exactly, percentiles by
    logarithmic classes."""

    def __init__(self) -> None:
        self._sum = self._sum_of_squares = 0.0
        self._min, self._max = math.inf, -math.inf
        self._classes: Counter[int] = Counter()

    def add(self, value: float, times: int = 1) -> None:
        """Add a value, not negative, this many times."""
        self._sum += value * times
        self._sum_of_squares += value * value * times
        self._min, self._max = min(self._min, value), max(self._max, value)
        self._classes[round(math.log(max(value, _SMALLEST)) / _LOG_RESOLUTION)] += times

    @classmethod
    def merged(cls, sketches: Iterable[Self]) -> Self:
        whole = cls()
        for sketch in sketches:
            whole._sum += sketch._sum
            whole._sum_of_squares += sketch._sum_of_squares
            whole._min, whole._max = min(whole._min, sketch._min), max(whole._max, sketch._max)
            whole._classes += sketch._classes
        return whole

    @property
    def mean(self) -> float | None:
        return self._sum / self._classes.total() if self._classes else None

    def distribution(self) -> Distribution | None:
        mean, count = self.mean, self._classes.total()
        if mean is None:
            return None
        deviation = math.sqrt(max(0.0, self._sum_of_squares / count - mean * mean))
        p50, p90, p99 = (self._percentile(share) for share in (0.5, 0.9, 0.99))
        return Distribution(count, mean, deviation, self._min, p50, p90, p99, self._max)

    def _percentile(self, share: float) -> float:
        wanted, passed = share * (self._classes.total() - 1), 0
        for number in sorted(self._classes):
            passed += self._classes[number]
            if passed > wanted:
                return min(max(math.exp(number * _LOG_RESOLUTION), self._min), self._max)
        raise AssertionError("the classes hold every value")


class Series(Generic[Value]):
    """A curve over time, thinned as it grows: when it has too many points, every second one
    goes."""

    def __init__(self) -> None:
        self.points: list[tuple[float, Value]] = []
        self._seen, self._stride = 0, 1

    def add(self, time: float, value: Value) -> None:
        """One more point, not earlier than any other."""
        if self._seen % self._stride == 0:
            self.points.append((time, value))
            if len(self.points) > _KEPT_POINTS:
                del self.points[1::2]
                self._stride *= 2
        self._seen += 1


def mean_series(curves: Sequence[Series[float]]) -> Series[float]:
    """The mean of curves that begin at 0 and keep each value until the next."""
    if len(curves) == 1:
        return curves[0]
    mean = Series[float]()
    values, total = [0.0] * len(curves), 0.0
    tagged = [
        [(time, number, value) for time, value in curve.points]
        for number, curve in enumerate(curves)
    ]
    for time, number, value in heapq.merge(*tagged):
        total += value - values[number]
        values[number] = value
        mean.add(time, total / len(curves))
    return mean


class Occupancy:
    """The share of KV blocks in use over time."""

    def __init__(self) -> None:
        self.series = Series[float]()
        self.seconds = self.peak = 0.0  # the share, integrated over time; the highest
        self._time = self._share = 0.0

    def add(self, time: float, share: float) -> None:
        """Set the share that holds from this time on, in seconds."""
        self.seconds += self._share * (time - self._time)
        self._time, self._share = time, share
        self.peak = max(self.peak, share)
        self.series.add(time, share)
