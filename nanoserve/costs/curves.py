"""MeasuredCurve and MeasuredGrid: measured times over sizes, straight lines between the sizes that
were measured."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

_SHORTEST = 1e-9  # seconds: the shortest difference of two times
_TIMES = ("seconds", "low", "high")

Size = Annotated[int, msgspec.Meta(ge=1, le=2**50)]  # may be bytes: floats up to here are exact
Seconds = Annotated[float, msgspec.Meta(gt=0, le=3e7)]
Table = tuple[tuple[Seconds, ...], ...]  # one row for each number of sequences


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured times: medians, and lower and upper quartiles in the same shape."""

    def rising(self) -> Self:
        """Make the times monotonic along each axis: two times that noise has exchanged meet half
        way."""
        return self._with(_rising)

    def undisturbed(self) -> Self:
        """Take the lower quartiles as times."""
        return msgspec.structs.replace(self, seconds=self.times["low"])

    @property
    def times(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _TIMES}

    def _with(self, change: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Self:
        changed = {name: change(np.array(times)).tolist() for name, times in self.times.items()}
        return msgspec.convert(msgspec.structs.asdict(self) | changed, type(self))


class MeasuredCurve(Measured, frozen=True, kw_only=True):
    """Times over one size (tokens, rows, bytes). Raises ValueError if these do not fit together."""

    sizes: tuple[Size, ...]  # ascending
    seconds: tuple[Seconds, ...]
    low: tuple[Seconds, ...]
    high: tuple[Seconds, ...]

    def __post_init__(self) -> None:
        _check_ascending("sizes", self.sizes)
        for name, seconds in self.times.items():
            _check_count(name, seconds, len(self.sizes))

    def at(self, size: float) -> float:
        """Seconds at that size: 0 at 0, constant below the first size, along the last line beyond
        the last."""
        return _interpolate(self.sizes, self.seconds, size)


class MeasuredGrid(Measured, frozen=True, kw_only=True):
    """Times over the number of sequences and the keys of each. Raises ValueError if these do not
    fit together."""

    batches: tuple[Size, ...]
    contexts: tuple[Size, ...]
    seconds: Table
    low: Table
    high: Table

    def __post_init__(self) -> None:
        _check_ascending("batches", self.batches)
        _check_ascending("contexts", self.contexts)
        for name, rows in self.times.items():
            if len(rows) != len(self.batches):
                raise ValueError(
                    f"{name} must have a row for each of {len(self.batches)} batches, not "
                    f"{len(rows)}"
                )
            for row in rows:
                _check_count(name, row, len(self.contexts))

    def at(self, batch: float, context: float) -> float:
        """Seconds for `batch` sequences of `context` keys each, on a line over the contexts, then
        one over the batches. Beyond the last sizes it grows in proportion, as reading bytes does:
        extended lines might cross."""
        if batch <= 0:
            return 0.0
        most, longest = self.batches[-1], self.contexts[-1]
        lower, upper, share = _between(self.batches, min(batch, most))
        few = _interpolate(self.contexts, self.seconds[lower], min(context, longest))
        many = _interpolate(self.contexts, self.seconds[upper], min(context, longest))
        seconds = few + share * (many - few)
        return seconds * max(1.0, batch / most) * max(1.0, context / longest)

    def less(self, part: MeasuredCurve) -> Self:
        """Subtract the curve's time for each batch."""
        parts = [[part.at(batch)] for batch in self.batches]
        return self._with(lambda rows: np.maximum(_SHORTEST, rows - parts))

    def cells(self) -> Iterator[tuple[int, int, float]]:
        """Each batch and context with its time."""
        for batch, row in zip(self.batches, self.seconds, strict=True):
            for context, seconds in zip(self.contexts, row, strict=True):
                yield batch, context, seconds

    def over_keys(self) -> MeasuredCurve:
        """A curve over the total number of keys: the means of the cells with equal totals."""
        cells = defaultdict[int, list[float]](list)
        for batch, context, seconds in self.cells():
            cells[batch * context].append(seconds)
        means = tuple(sum(cells[size]) / len(cells[size]) for size in sorted(cells))
        return MeasuredCurve(sizes=tuple(sorted(cells)), seconds=means, low=means, high=means)


def _interpolate(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    if size <= 0:
        return 0.0
    lower, upper, share = _between(sizes, size)
    below, above = seconds[lower], seconds[upper]
    if share <= 1:
        return below + share * (above - below)
    return above + (share - 1) * max(0.0, above - below)


def _between(sizes: Sequence[int], size: float) -> tuple[int, int, float]:
    """Indices of the sizes around `size`, and its place: 0 at the lower, 1 at the upper, above 1
    beyond the last."""
    if size <= sizes[0]:
        return 0, 0, 0.0
    upper = min(bisect_left(sizes, size), len(sizes) - 1)
    lower = upper - 1
    return lower, upper, (size - sizes[lower]) / (sizes[upper] - sizes[lower])


def _rising(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Move times half way between the largest so far and the smallest from here on. Rows come
    first: columns leave them rising."""
    for axis in reversed(range(times.ndim)):
        smallest = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = (np.maximum.accumulate(times, axis) + smallest) / 2
    return times


def _check_ascending(name: str, sizes: Sequence[int]) -> None:
    if len(sizes) < 2 or any(size >= following for size, following in pairwise(sizes)):
        raise ValueError(f"{name} must be two or more whole numbers, ascending, not {list(sizes)}")


def _check_count(name: str, seconds: Sequence[float], count: int) -> None:
    if len(seconds) != count:
        raise ValueError(f"{name} must be {count} numbers, one for each size, not {len(seconds)}")
