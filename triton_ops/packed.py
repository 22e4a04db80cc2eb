"""Matrices of small integers with a scale for each group of columns, and a linear layer that
computes from them.

`GroupQuantized` is the form that every quantized format is decoded into. `pack` brings it into the
order that the kernels read: 16 rows together, so that each has a lane of a vector.

Packed, 16 rows are one row of bytes: one cell after another, each of the columns of a group, or of
256 columns where groups share a number. A cell holds scales, offsets, and the codes of 32 columns
after another. Codes of 4 bits lie in 4 lines of 64 bytes: byte ``4 * row + i`` of line j has column
``4 * j + i`` in its lower half and column ``16 + 4 * j + i`` in its upper half. A fifth bit lies in
one more line, where bit q of a byte belongs to column ``4 * q + i``. A fifth and a sixth lie in two
more lines, one for each 16 columns, two bits for each 4 columns. Codes of 8 bits take 8 lines.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.registration import OPERATORS

ROWS = 16
"""Rows of weights that are packed together."""
_COLUMNS, _QUAD = 32, 4
_LANES = 3  # the dimension of a view that goes over the rows of a block
_SUPER_SPAN = 256

SCALES = (torch.float16, torch.bfloat16, torch.float32)
_SUPER_SCALES = 3
_ONE_ZERO, _ZEROS, _MINIMUMS, _SUPER_MINIMUMS = range(4)


class PackedFormat(NamedTuple):
    """Meaning of a packed matrix's bytes. The numbers are those of packed_linear.h."""

    bits: int
    """Bits of a code: 4, 5, 6 or 8. Codes of 8 bits are signed."""
    group: int
    """Columns that share a scale: 16 of 6 bits, else a multiple of 32."""
    scale: int
    """Place of the scales' dtype in float16, bfloat16, float32; or 3: int8, times a float16 of 256
    columns."""
    offset: int
    """Kind of offset to subtract. 0: `zero` scales; 1: a uint8 number of scales; 2: a float16
    number; 3: uint8, times a float16 of 256 columns."""
    zero: int

    @property
    def span(self) -> int:
        """Columns of a cell."""
        return _SUPER_SPAN if self.scale == _SUPER_SCALES else self.group

    @property
    def can_be_packed(self) -> bool:
        return self.span % _COLUMNS == 0

    def row_bytes(self, columns: int) -> int:
        """Bytes of 16 packed rows."""
        groups = self.span // self.group
        scales = groups + 2 if self.scale == _SUPER_SCALES else groups * SCALES[self.scale].itemsize
        offsets = (0, groups, 2 * groups, groups + 2)[self.offset]
        return columns // self.span * ROWS * (scales + offsets + self.span * self.bits // 8)


SIX_BITS = PackedFormat(6, 16, _SUPER_SCALES, _ONE_ZERO, zero=32)
"""Codes of 6 bits in groups of 16, as in GGUF's Q6_K: each group has an int8, times a float16 of
256 columns."""


@dataclass(frozen=True, slots=True)
class GroupQuantized:
    """A matrix [N, K] of integers in G groups of K / G columns: ``(code - zero) * scale -
    minimum``, or with a `zero` for each group. Where S is given, its groups have integers that are
    multiplied by a number of 256 columns."""

    codes: Tensor
    """uint8 [N, K]; int8 if they have 8 bits."""
    bits: int
    scales: Tensor
    """float16, bfloat16 or float32 [N, G]; int8 if there are `super_scales`."""
    super_scales: Tensor | None = None
    """float16 [N, K / 256]"""
    zero: int = 0
    zeros: Tensor | None = None
    """uint8 [N, G]"""
    minimums: Tensor | None = None
    """float16 [N, G]; uint8 if there are `super_minimums`."""
    super_minimums: Tensor | None = None
    """float16 [N, K / 256]"""
    order: Tensor | None = None
    """int64 [K]: the column of the input that each column belongs to; None means all in order."""

    @property
    def format(self) -> PackedFormat:
        scale = _SUPER_SCALES if self.super_scales is not None else SCALES.index(self.scales.dtype)
        offset = _ZEROS if self.zeros is not None else _ONE_ZERO
        if self.minimums is not None:
            offset = _MINIMUMS if self.super_minimums is None else _SUPER_MINIMUMS
        return PackedFormat(
            self.bits, self.codes.shape[1] // self.scales.shape[1], scale, offset, self.zero
        )

    def dequantize(self) -> Tensor:
        """float32 [N, K]. The operations and their order are those of the formats' reference
        implementations."""
        rows, groups = self.scales.shape
        codes = self.codes.view(rows, groups, -1).float()
        scales = _multiplied(self.scales, self.super_scales)[:, :, None]
        if self.minimums is not None:
            values = codes * scales - _multiplied(self.minimums, self.super_minimums)[:, :, None]
        else:
            values = (
                codes - (self.zero if self.zeros is None else self._zero_codes()[:, :, None])
            ) * scales
        values = values.view(rows, -1)
        return values if self.order is None else values[:, self.order.argsort()]

    def is_finite(self) -> bool:
        """Whether all numbers that codes are multiplied by, and that are subtracted, are finite."""
        numbers = (self.scales, self.super_scales, self.minimums, self.super_minimums)
        return all(bool(found.isfinite().all()) for found in numbers if found is not None)

    def _zero_codes(self) -> Tensor:
        """float32 [N, G]: codes of 8 bits are signed, their zeros are stored without a sign."""
        assert self.zeros is not None
        return self.zeros.float() - (128 if self.bits == 8 else 0)

    def rows(self, taken: Tensor) -> "GroupQuantized":
        """Some rows, int64 [n]."""
        return self._parts(lambda part: part if part is self.order else part[taken])

    def columns(self, taken: range) -> "GroupQuantized":
        """Some columns: whole cells of the packed form."""

        def cut(part: Tensor) -> Tensor:
            each = self.codes.shape[1] // part.shape[1]
            return part[:, taken.start // each : taken.stop // each]

        return self._parts(cut)

    def _parts(self, change: Callable[[Tensor], Tensor]) -> "GroupQuantized":
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        changed: dict[str, Any] = {
            name: change(part) for name, part in parts.items() if isinstance(part, Tensor)
        }
        return replace(self, **changed)


def _multiplied(numbers: Tensor, supers: Tensor | None) -> Tensor:
    if supers is None:
        return numbers.float()
    each = numbers.view(*supers.shape, -1).float() * supers.float()[:, :, None]
    return each.view(numbers.shape)


def round_to_nearest(weight: Tensor, bits: int, group: int) -> GroupQuantized:
    """weight [N, K], any float dtype, as codes of 4, 6 or 8 bits. Each group of columns has a
    float16 scale; with 6 bits scales are those of SIX_BITS. With 4 and 6 bits, the value of the
    largest size gets the lowest code, which no other sign has."""
    groups, half = weight.float().view(len(weight), -1, group), 1 << bits - 1
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).half()
    else:
        largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        scales = (largest / -half).half()
    supers = None
    if bits == SIX_BITS.bits:
        exact = scales.float().view(len(weight), -1, _SUPER_SPAN // group)
        supers = (exact.abs().amax(-1) / 127).half()
        divisors = supers.float().where(supers != 0, 1.0)[:, :, None]
        scales = (exact / divisors).round().to(torch.int8).view(scales.shape)
    divisors = _multiplied(scales, supers)
    codes = (groups / divisors.where(divisors != 0, 1.0)[:, :, None]).round().view(weight.shape)
    if bits == 8:
        return GroupQuantized(codes.clamp(-127, 127).to(torch.int8), 8, scales)
    codes = (codes + half).clamp(0, 2 * half - 1).to(torch.uint8)
    return GroupQuantized(codes, bits, scales, super_scales=supers, zero=half)


def pack(matrix: GroupQuantized) -> Tensor:
    """uint8 [ceil(N / 16), bytes of 16 rows]; rows beyond N are zero."""
    span, missing = matrix.format.span, -len(matrix.codes) % ROWS
    cells = matrix.codes.shape[1] // span

    def laid_out(part: Tensor) -> Tensor:
        """[N, C * n] -> bytes [N / 16, C, bytes]: n numbers of the 16 rows after another."""
        padded = torch.cat((part, part.new_zeros(missing, part.shape[1])))
        return (
            padded.reshape(-1, ROWS, cells, part.shape[1] // cells)
            .permute(0, 2, 3, 1)
            .contiguous()
            .view(torch.uint8)
            .reshape(-(-len(part) // ROWS), cells, -1)
        )

    numbers = (
        matrix.super_scales,
        matrix.scales,
        matrix.super_minimums,
        matrix.zeros,
        matrix.minimums,
    )
    parts = [laid_out(part) for part in numbers if part is not None]
    codes = torch.cat((matrix.codes, matrix.codes.new_zeros(missing, matrix.codes.shape[1])))
    quads = codes.view(torch.uint8).view(
        -1, ROWS, cells, span // _COLUMNS, _COLUMNS // _QUAD, _QUAD
    )
    lines = _lines(quads.permute(0, 2, 3, 4, 1, 5).flatten(-2), matrix.bits)
    return torch.cat((*parts, lines.flatten(2)), dim=2).flatten(1)


def _lines(quads: Tensor, bits: int) -> Tensor:
    """uint8 [..., 8, 64], codes of 8 times 4 columns -> [..., lines, 64]"""
    if bits == 8:
        return quads
    first, last = torch.split(quads, 4, dim=-2)
    lines = [first & 15 | last << 4]
    shifts = torch.arange(8, dtype=torch.uint8, device=quads.device)[:, None]
    if bits == 5:
        lines.append(((quads >> 4) << shifts).sum(-2, keepdim=True, dtype=torch.uint8))
    if bits == 6:
        lines += [
            ((half >> 4) << 2 * shifts[:4]).sum(-2, keepdim=True, dtype=torch.uint8)
            for half in (first, last)
        ]
    return torch.cat(lines, dim=-2)


def unpack(packed: Tensor, rows: int, form: PackedFormat) -> GroupQuantized:
    """The matrix that `pack` packed, without its padding."""

    def in_order(view: Tensor) -> Tensor:
        lanes = view.movedim(_LANES, 1)
        return lanes.reshape(-1, *lanes.shape[2:])[:rows]

    return _matrix({name: in_order(view) for name, view in _views(packed, form).items()}, form)


def _views(packed: Tensor, form: PackedFormat) -> dict[str, Tensor]:
    """Each kind of numbers, [N / 16, C, n, 16, 1], and the codes as "lines", bytes [N / 16, C,
    lines, 16, 4]."""
    bits, group, scale, offset, _ = form
    groups = form.span // group
    # Bytes of a row's numbers in a cell, in their order.
    widths = {
        "super_scales": (torch.float16, 1 if scale == _SUPER_SCALES else 0),
        "scales": (torch.int8 if scale == _SUPER_SCALES else SCALES[scale], groups),
        "super_minimums": (torch.float16, 1 if offset == _SUPER_MINIMUMS else 0),
        "zeros": (torch.uint8, groups if offset == _ZEROS else 0),
        "minimums": (
            torch.uint8 if offset == _SUPER_MINIMUMS else torch.float16,
            groups if offset in (_MINIMUMS, _SUPER_MINIMUMS) else 0,
        ),
    }
    used = sum(dtype.itemsize * count for dtype, count in widths.values()) * ROWS
    cells = packed.view(len(packed), -1, used + form.span * bits * ROWS // 8)
    views = {"lines": cells[:, :, used:].view(*cells.shape[:2], -1, ROWS, _QUAD)}
    first = 0
    for name, (dtype, count) in widths.items():
        after = first + dtype.itemsize * count * ROWS
        if count:
            views[name] = (
                cells[:, :, first:after].view(dtype).view(*cells.shape[:2], count, ROWS, 1)
            )
        first = after
    return views


def _matrix(views: dict[str, Tensor], form: PackedFormat) -> GroupQuantized:
    """The matrix of views whose rows are in order, [N, C, n, 1] and [N, C, lines, 4]."""
    lines = views.pop("lines")
    each = lines.shape[2] * _COLUMNS // form.span
    codes = _codes(
        lines.view(*lines.shape[:2], form.span // _COLUMNS, each, _QUAD), form.bits
    ).flatten(1)
    parts = {name: view.flatten(1) for name, view in views.items()}
    return GroupQuantized(
        codes.view(torch.int8) if form.bits == 8 else codes, form.bits, zero=form.zero, **parts
    )


def _codes(lines: Tensor, bits: int) -> Tensor:
    """The inverse of `_lines`."""
    if bits == 8:
        return lines
    low = torch.cat((lines[..., :4, :] & 15, lines[..., :4, :] >> 4), dim=-2)
    shifts = torch.arange(8, dtype=torch.uint8, device=lines.device)[:, None]
    if bits == 5:
        return low | (lines[..., 4:, :] >> shifts & 1) << 4
    if bits == 6:
        high = [line >> 2 * shifts[:4] & 3 for line in torch.split(lines[..., 4:, :], 1, dim=-2)]
        return low | torch.cat(high, dim=-2) << 4
    return low


def packed_linear(
    input: Tensor, packed: Tensor, bias: Tensor | None, columns: int, form: PackedFormat
) -> Tensor:
    """input [..., K] times a packed matrix [columns, K] transposed, plus bias [columns] -> [...,
    columns]."""
    out = _packed_linear(input.reshape(-1, input.shape[-1]), packed, bias, columns, *form)
    return out.view(*input.shape[:-1], columns)


def _fake_packed_linear(
    rows: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    columns: int,
    bits: int,
    group: int,
    scale: int,
    offset: int,
    zero: int,
) -> Tensor:
    return rows.new_empty(rows.shape[0], columns)


@OPERATORS.define(fake=_fake_packed_linear)
def _packed_linear(
    rows: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    columns: int,
    bits: int,
    group: int,
    scale: int,
    offset: int,
    zero: int,
) -> Tensor:
    """rows [R, K] -> [R, columns]"""
    return multiply_unpacked(rows, packed, bias, columns, bits, group, scale, offset, zero)


def multiply_unpacked(
    rows: Tensor, packed: Tensor, bias: Tensor | None, columns: int, *form: int
) -> Tensor:
    """Multiply by the unpacked matrix, in the dtype of the rows."""
    weight = unpack(packed, columns, PackedFormat(*form)).dequantize()
    return functional.linear(rows, weight.to(rows.dtype), bias)


def packed_rows(packed: Tensor, indices: Tensor, form: PackedFormat) -> Tensor:
    """Some rows of a packed matrix: int64 [n] -> float32 [n, K]."""
    blocks, lanes = indices // ROWS, indices % ROWS
    taken = {
        name: view.movedim(_LANES, 1)[blocks, lanes] for name, view in _views(packed, form).items()
    }
    return _matrix(taken, form).dequantize()
