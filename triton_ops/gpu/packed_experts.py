"""A mixture of experts with packed matrices on a GPU. Up to `most_captured_tokens`, everything that
is launched follows from shapes alone, and nothing waits for the GPU."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from triton_ops.experts import gated, share_out_packed
from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.experts import MULTIPLIED_PACKED, add_up_experts
from triton_ops.gpu.kernels.packed_experts import multiply_groups, multiply_pairs
from triton_ops.gpu.packed import packed_views
from triton_ops.gpu.packed_constants import (
    Tile,
    columns_in_parts,
    packed_constants,
    tile_of_experts,
)


class _Matrices(NamedTuple):
    """A packed matrix for each expert, uint8 [num_experts, blocks of 16 rows, bytes], the biases
    [num_experts, outputs], the rows of a matrix, and the numbers of its PackedFormat."""

    packed: Tensor
    bias: Tensor | None
    outputs: int
    form: tuple[int, ...]


class _Groups(NamedTuple):
    """Pairs (token, expert) that are sorted by expert: where those of each pair's expert begin and
    end, int32 [P]."""

    firsts: Tensor
    ends: Tensor


def sparse_packed_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    first_form: list[int],
    second_form: list[int],
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    """The operator `sparse_packed_experts`. For more tokens than `most_captured_tokens`, each
    expert multiplies its share by itself, and the host waits to learn how large that is."""
    num_tokens, experts_per_token = experts.shape
    tile = tile_of_experts(num_tokens, experts_per_token, len(gate_up))
    if tile is None or hidden.dtype not in MULTIPLIED_PACKED:
        forms, biases = (first_form, second_form), (gate_up_bias, down_bias)
        return share_out_packed(
            hidden, weights, experts, gate_up, down, inner, *forms, *biases, style
        )
    rows = inner if style == "relu2" else 2 * inner
    first = _Matrices(gate_up, gate_up_bias, rows, tuple(first_form))
    second = _Matrices(down, down_bias, hidden.shape[1], tuple(second_form))
    pairs = experts.flatten()
    if tile.rows == 1:
        inside = _multiply(hidden, pairs, None, first, tile)
        outputs = _multiply(gated(inside, style), pairs, None, second, tile)
        return add_up_experts(outputs, weights, hidden.dtype)
    pairs, order = pairs.sort(stable=True)
    groups = _Groups(
        torch.searchsorted(pairs, pairs, out_int32=True),
        torch.searchsorted(pairs, pairs, right=True, out_int32=True),
    )
    shares = hidden.index_select(0, order // experts_per_token)
    inside = _multiply(shares, pairs, groups, first, tile)
    sorted_outputs = _multiply(gated(inside, style), pairs, groups, second, tile)
    outputs = torch.empty_like(sorted_outputs).index_copy_(0, order, sorted_outputs)
    return add_up_experts(outputs, weights, hidden.dtype)


def _multiply(
    rows: Tensor, experts: Tensor, groups: _Groups | None, matrices: _Matrices, tile: Tile
) -> Tensor:
    """Multiply rows [R, K] with matrices of experts, int64 [P]: [P, outputs]. Without groups, each
    row belongs to P / R experts side by side."""
    packed, bias, outputs, form = matrices
    rows, count = rows.contiguous(), len(experts)
    tiles = min(count, len(packed) + count // tile.rows) * triton.cdiv(outputs, tile.outputs)
    parts, steps_per_part = columns_in_parts(
        rows.shape[1], tile, tiles, gpu_of(rows.device).multiprocessors
    )
    dtype = rows.dtype if parts == 1 else torch.float32
    sums = rows.new_empty((parts, count, outputs), dtype=dtype)
    has_bias = bias is not None and parts == 1
    inputs = (*packed_views(packed, form), bias if has_bias else sums)
    strides = (rows.stride(0), packed.stride(0) // 16, packed.stride(1) // 16)
    options = {
        **packed_constants(form, tile),
        "HAS_BIAS": has_bias,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    grid = (count, triton.cdiv(outputs, tile.outputs), parts)
    sizes = [outputs, rows.shape[1], count]
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        if groups is None:
            sizes.append(count // len(rows))
            multiply_pairs[grid](
                sums, rows, experts, *inputs, *sizes, *strides, steps_per_part, **options
            )
        else:
            multiply_groups[grid](
                sums, rows, experts, *groups, *inputs, *sizes, *strides, steps_per_part, **options
            )
    if parts == 1:
        return sums[0]
    total = sums.sum(0)
    if bias is not None:
        total += bias.index_select(0, experts)
    return total.to(rows.dtype)
