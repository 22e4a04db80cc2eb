"""Parts of tensors: a `TensorPart` is one tensor of a checkpoint, or the part of it that fills some
rows of a parameter, and perhaps only those that one shard of the model needs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from nanoserve.models.shards import Shard, divided


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the checkpoint, or a part of it, and the rows of a parameter that it fills."""

    name: str
    """The tensor's name in the checkpoint."""
    parameter: str
    """Name of the parameter that it fills."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int = 0
    expert: int | None = None
    """First row to fill in the parameter, or in the matrix of this expert."""
    rows: range | None = None
    columns: range | None = None
    """Rows and columns that are taken from the tensor; None takes all."""

    @property
    def source(self) -> tuple[slice, ...]:
        """The index into the tensor that selects the part."""
        index = []
        for span in self._spans:
            index.append(slice(span.start, span.stop))
        return tuple(index)

    @property
    def size(self) -> int:
        """Number of values in the part."""
        return math.prod(len(span) for span in self._spans)

    @property
    def num_rows(self) -> int:
        """Rows that are taken from the tensor."""
        return len(self._spans[0])

    @property
    def _spans(self) -> tuple[range, ...]:
        """The range of each dimension that is taken."""
        spans = [range(length) for length in self.shape]
        if self.rows is not None:
            spans[0] = self.rows
        if self.columns is not None and len(spans) > 1:
            spans[1] = self.columns
        return tuple(spans)

    def region(self, parameter: Tensor) -> Tensor:
        """The view of the parameter that the part fills."""
        if self.expert is not None:
            parameter = parameter[self.expert]
        filled = parameter[self.first_row : self.first_row + self.num_rows]
        if len(self.shape) > filled.dim():  # the kernel of a convolution, whose groups have a size
            return filled[:, None]
        if self.columns is None:
            return filled
        return filled[:, : len(self.columns)]

    def pieces(self, most: int) -> Iterator["TensorPart"]:
        """The part in runs of rows with at most `most` numbers, or in single rows."""
        rows = self._spans[0]
        columns = math.prod(self.shape[1:])
        run = max(16, most // columns // 16 * 16)
        for first in rows[::run]:
            taken = range(first, min(first + run, rows.stop))
            offset = first - rows.start
            yield replace(self, rows=taken, first_row=self.first_row + offset)


def row_parts(
    names: Sequence[str],
    parameter: str,
    sizes: tuple[int, ...],
    columns: int,
    *,
    bias: bool,
    first_row: int = 0,
) -> Iterator[TensorPart]:
    """The parts of a matrix of row blocks; one name for several blocks means that they are stored
    fused."""
    if len(names) < len(sizes):
        sizes = (sum(sizes),)
    for name, rows in zip(names, sizes, strict=True):
        yield TensorPart(f"{name}.weight", f"{parameter}.weight", (rows, columns), first_row)
        if bias:
            yield TensorPart(f"{name}.bias", f"{parameter}.bias", (rows,), first_row)
        first_row += rows


def interleaved_parts(
    name: str,
    parameters: Sequence[str],
    sizes: Sequence[int],
    num_heads: int,
    columns: int,
    *,
    first_rows: Sequence[int] | None = None,
    bias: bool = False,
) -> Iterator[TensorPart]:
    """The parts of a stored matrix whose rows are, for each head in turn, `sizes` rows of each of
    these parameters, where they begin at `first_rows` (None: at 0)."""
    if first_rows is None:
        first_rows = [0] * len(sizes)
    stored_rows = num_heads * sum(sizes)
    kinds: list[tuple[str, tuple[int, ...]]] = [("weight", (stored_rows, columns))]
    if bias:
        kinds.append(("bias", (stored_rows,)))
    for kind, shape in kinds:
        stored = 0
        for head in range(num_heads):
            for parameter, size, first_row in zip(parameters, sizes, first_rows, strict=True):
                yield TensorPart(
                    f"{name}.{kind}",
                    f"{parameter}.{kind}",
                    shape,
                    first_row + head * size,
                    rows=range(stored, stored + size),
                )
                stored += size


class DividedRows(NamedTuple):
    """Rows (or columns) of a whole parameter that are divided together."""

    size: int
    kept: range
    """Rows that the rank has."""
    width: int
    """Rows of the rank's own parameter for this block; the last ones may be padding."""


def divide_evenly(size: int, shard: Shard) -> DividedRows:
    """A block that is divided into equal parts."""
    return DividedRows(size, shard.share(size), divided(size, shard.degree))
