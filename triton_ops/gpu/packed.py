"""Products of rows with packed matrices on a GPU. Everything that is launched follows from shapes
alone."""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.packed import add_up_parts, multiply_packed, multiply_row, unpack_matrix
from triton_ops.gpu.packed_constants import (
    ELEMENTS_PER_PROGRAM,
    REDUCTION_WARPS,
    UNPACKING,
    columns_in_parts,
    packed_constants,
    tile_of,
)
from triton_ops.packed import SCALES

_SCALES = (*SCALES, torch.int8)


def packed_linear(
    rows: Tensor, packed: Tensor, bias: Tensor | None, columns: int, *form: int
) -> Tensor:
    """The operator `packed_linear`: rows [R, K] -> [R, columns]. Many rows, and rows in float32,
    are multiplied by the unpacked matrix."""
    tile = (
        tile_of(len(rows)) if len(rows) and rows.dtype in (torch.bfloat16, torch.float16) else None
    )
    if tile is None:
        return functional.linear(rows, _unpacked(packed, columns, rows, *form), bias)
    rows = rows.contiguous()
    grid = (triton.cdiv(len(rows), tile.rows), triton.cdiv(columns, tile.outputs))
    parts, steps_per_part = columns_in_parts(
        rows.shape[1], tile, grid[0] * grid[1], gpu_of(rows.device).multiprocessors
    )
    out = rows.new_empty(len(rows), columns)
    sums = out if parts == 1 else out.new_empty((parts, *out.shape), dtype=torch.float32)
    has_bias = bias is not None
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        multiply = multiply_packed if tile.rows > 1 else multiply_row
        multiply[(*grid, parts)](
            sums,
            rows,
            *packed_views(packed, form),
            bias if has_bias and parts == 1 else out,
            columns,
            rows.shape[1],
            len(rows),
            rows.stride(0),
            packed.stride(0) // 16,
            steps_per_part,
            **packed_constants(form, tile),
            HAS_BIAS=has_bias and parts == 1,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if parts > 1:
            add_up_parts[(triton.cdiv(out.numel(), ELEMENTS_PER_PROGRAM),)](
                out,
                sums,
                bias if has_bias else out,
                out.numel(),
                columns,
                parts,
                ELEMENTS=ELEMENTS_PER_PROGRAM,
                HAS_BIAS=has_bias,
                num_warps=REDUCTION_WARPS,
            )
    return out


def packed_views(packed: Tensor, form: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The bytes as words, as scales, as float16 and as they are."""
    return (
        packed.view(torch.int32),
        packed.view(_SCALES[form[2]]),
        packed.view(torch.float16),
        packed,
    )


def _unpacked(packed: Tensor, outputs: int, rows: Tensor, *form: int) -> Tensor:
    """The matrix itself, [outputs, K], in the dtype of the rows."""
    out = rows.new_empty(outputs, rows.shape[1])
    grid = (triton.cdiv(rows.shape[1], UNPACKING.step), triton.cdiv(outputs, UNPACKING.outputs))
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        unpack_matrix[grid](
            out,
            *packed_views(packed, form),
            outputs,
            rows.shape[1],
            packed.stride(0) // 16,
            **packed_constants(form, UNPACKING),
            num_warps=UNPACKING.num_warps,
        )
    return out
