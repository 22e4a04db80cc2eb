"""Products of rows with the packed matrices of experts, of which each row has its own.

Which expert a row has is read here, so that a launch needs shapes alone. The products themselves
are those of `kernels/packed.py`, whose pointers are moved to the expert's matrix.
"""

import triton
import triton.language as tl

from triton_ops.gpu.kernels.packed import multiply_packed, multiply_row


@triton.jit
def multiply_pairs(
    out, rows, experts, words, scales, halves, numbers, bias, num_outputs, num_columns, num_pairs,
    pairs_per_row, row_stride, expert_quads, block_quads, steps_per_part,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr, TILE_OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (q, n, p): pair q of a row and an expert, with TILE_OUTPUTS rows of the expert's
    weights, over the columns of part p. Programs of all pairs with the same n start one after
    another, so those of the same expert share what the L2 cache holds.

    Arguments are those of `multiply_row`, and: experts int64 [num_pairs]; pairs_per_row: pairs of a
    row of the input, which stand side by side; expert_quads: 16 bytes of an expert's matrix; bias
    [experts, num_outputs]; out [parts, num_pairs, num_outputs].
    """
    pair = tl.program_id(0)
    expert = tl.load(experts + pair)
    matrix = expert * expert_quads
    # `multiply_row` reads the input's row that has the number of the pair.
    moved = (pair // pairs_per_row - pair).to(tl.int64) * row_stride
    multiply_row(
        out, rows + moved,
        words + matrix * 4, scales + matrix * (16 // SCALE_BYTES), halves + matrix * 8,
        numbers + matrix * 16, bias + expert * num_outputs,
        num_outputs, num_columns, num_pairs, row_stride, block_quads, steps_per_part,
        BITS, GROUP, ZERO, OFFSET, SCALE_BYTES, STEP, TILE_OUTPUTS, HAS_BIAS,
    )  # fmt: skip


@triton.jit
def multiply_groups(
    out, rows, experts, firsts, ends, words, scales, halves, numbers, bias, num_outputs,
    num_columns, num_rows, row_stride, expert_quads, block_quads, steps_per_part,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (r, n, p): up to TILE_ROWS rows of one expert from row r on, as `multiply_packed`
    computes them. Each expert's rows stand side by side; a program whose row is not the first of
    a tile of TILE_ROWS of them ends at once.

    Arguments are those of `multiply_packed`, and, for each row: experts, its expert, int64; firsts
    and ends, the first row of that expert and the row after its last, int32. expert_quads: 16
    bytes of an expert's matrix; bias [experts, num_outputs].
    """
    row = tl.program_id(0)
    if (row - tl.load(firsts + row)) % TILE_ROWS != 0:
        return
    expert = tl.load(experts + row)
    matrix = expert * expert_quads
    # `multiply_packed` gives the rows of this tile the numbers from row * TILE_ROWS on.
    numbered = row * TILE_ROWS
    after = numbered + tl.minimum(tl.load(ends + row) - row, TILE_ROWS)
    moved = (row - numbered).to(tl.int64)
    part = tl.program_id(2).to(tl.int64)
    multiply_packed(
        out + (moved + part * (num_rows - after)) * num_outputs, rows + moved * row_stride,
        words + matrix * 4, scales + matrix * (16 // SCALE_BYTES), halves + matrix * 8,
        numbers + matrix * 16, bias + expert * num_outputs,
        num_outputs, num_columns, after, row_stride, block_quads, steps_per_part,
        BITS, GROUP, ZERO, OFFSET, SCALE_BYTES, STEP, TILE_ROWS, TILE_OUTPUTS, HAS_BIAS,
    )  # fmt: skip
