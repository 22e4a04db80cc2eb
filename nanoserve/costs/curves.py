"""Curve and Grid: measured times over sizes, straight lines between the sizes that were measured."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import msgspec

_LARGEST = 2**50
"""Of sizes, bytes perhaps: as floats they are still exact."""
_LONGEST = 3e7
"""Seconds."""


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times over one size (tokens, rows, bytes).

    Attributes:
        sizes: measured ones, ascending, from 1.
        seconds: the median at each.
        low, high: its quartiles.

    Raises:
        ValueError: if these do not fit together; msgspec says where.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        check_sizes("sizes", self.sizes)
        for name in ("seconds", "low", "high"):
            check_seconds(name, getattr(self, name), len(self.sizes))

    def at(self, size: float) -> float:
        """Seconds at that size: 0 at 0, the first one's below the first, beyond the last one along the last line."""
        return interpolate(self.sizes, self.seconds, size)


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times over the number of sequences and the keys that each reads.

    Attributes:
        batches, contexts: measured ones, ascending, from 1.
        seconds: the medians, one row for each batch.
        low, high: their quartiles.

    Raises:
        ValueError: if these do not fit together; msgspec says where.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    low: tuple[tuple[float, ...], ...]
    high: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        check_sizes("batches", self.batches)
        check_sizes("contexts", self.contexts)
        for name in ("seconds", "low", "high"):
            rows = getattr(self, name)
            if len(rows) != len(self.batches):
                raise ValueError(f"{name} must have a row for each of {len(self.batches)} batches, not {len(rows)}")
            for row in rows:
                check_seconds(name, row, len(self.contexts))

    def at(self, batch: float, context: float) -> float:
        """Seconds for so many sequences of so many keys each: a line over the contexts, then one over the batches."""
        if not batch:
            return 0.0
        return interpolate(self.batches, [interpolate(self.contexts, row, context) for row in self.seconds], batch)

    def by_keys(self, keys: float) -> float:
        """Seconds for so many keys in all, whoever reads them: a line over the means of cells with as many keys."""
        if keys <= 0:
            return 0.0
        cells: dict[int, list[float]] = {}
        for size, seconds in self._cells():
            cells.setdefault(size, []).append(seconds)
        sizes = sorted(cells)
        return interpolate(sizes, [sum(cells[size]) / len(cells[size]) for size in sizes], keys)

    def _cells(self) -> Iterator[tuple[int, float]]:
        for batch, row in zip(self.batches, self.seconds, strict=True):
            yield from ((batch * context, seconds) for context, seconds in zip(self.contexts, row, strict=True))


def interpolate(sizes: Sequence[int], seconds: Sequence[float], size: float) -> float:
    """Piecewise linear; 0 at 0, constant below the first size; beyond the last along the last line, never falling."""
    if size <= 0:
        return 0.0
    if size <= sizes[0]:
        return seconds[0]
    above = bisect_left(sizes, size)
    if above == len(sizes):
        rise = max(0.0, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return seconds[-1] + rise * (size - sizes[-1])
    share = (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """That there are two or more, ascending from 1.

    Raises:
        ValueError: naming the field.
    """
    if any(size > _LARGEST for size in sizes):
        raise ValueError(f"{name} must be at most {_LARGEST}")
    if len(sizes) < 2 or any(size >= following for size, following in pairwise(chain((0,), sizes))):
        raise ValueError(f"{name} must be two or more whole numbers from 1, ascending, not {list(sizes)}")


def check_seconds(name: str, seconds: Sequence[float], count: int) -> None:
    """That there are so many, all above 0 and none beyond a year or so.

    Raises:
        ValueError: naming the field.
    """
    if len(seconds) != count:
        raise ValueError(f"{name} must be {count} numbers, one for each size, not {len(seconds)}")
    if bad := [value for value in seconds if not 0 < value <= _LONGEST]:
        raise ValueError(f"{name} must be numbers above 0, not {bad[0]}; the most is {_LONGEST:g}")
