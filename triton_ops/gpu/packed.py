"""Products of rows with packed matrices on a GPU. Everything that is launched follows from shapes alone."""

import torch
import triton
from torch import Tensor

from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.packed import add_up_parts, multiply_packed
from triton_ops.gpu.packed_constants import (
    ELEMENTS_PER_PROGRAM,
    REDUCTION_WARPS,
    num_parts,
    product_constants,
    tile_of,
)
from triton_ops.packed import SCALES, multiply_unpacked

_SCALES = (*SCALES, torch.int8)


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None, columns: int, *form: int) -> Tensor:
    """The operator `packed_linear`: rows [R, K] -> [R, columns]. float32 rows are multiplied by an unpacked matrix."""
    if rows.dtype not in (torch.bfloat16, torch.float16) or not len(rows):
        return multiply_unpacked(rows, packed, bias, columns, *form)
    rows = rows.contiguous()
    tile = tile_of(len(rows))
    constants = product_constants(form, tile)
    grid = (triton.cdiv(len(rows), tile.rows), triton.cdiv(columns, tile.outputs))
    steps = rows.shape[1] // constants["STEP"]
    parts = num_parts(steps, grid[0] * grid[1], gpu_of(rows.device).multiprocessors)
    steps_per_part = triton.cdiv(steps, parts)
    parts = triton.cdiv(steps, steps_per_part)
    out = rows.new_empty(len(rows), columns)
    sums = out if parts == 1 else out.new_empty((parts, *out.shape), dtype=torch.float32)
    has_bias = bias is not None
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        multiply_packed[(*grid, parts)](
            sums,
            rows,
            packed,
            packed.view(_SCALES[form[2]]),
            packed.view(torch.float16),
            bias if has_bias and parts == 1 else out,
            len(rows),
            columns,
            rows.stride(0),
            packed.stride(0),
            steps,
            steps_per_part,
            **constants,
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
