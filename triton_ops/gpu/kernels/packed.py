"""Products of rows with a packed matrix of integers, whose layout `triton_ops.packed` describes.

The order of columns within a product is free: codes in the lower halves of bytes meet their columns of the input in one
product, those in the upper halves meet theirs in another, and codes stay with the thread that unpacks them.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # rows of weights that are packed together
LINE = tl.constexpr(64)  # bytes of a line, four for each of these rows
_BASE = tl.constexpr(8388608.0)
_BASE_BITS = tl.constexpr(0x4B000000)  # those of 2^23, whose lowest bits are an integer that is added to it


@triton.jit
def _number(integers):
    """Integers below 2^23, int32, plus 2^23 as float32: cheaper than a conversion."""
    return (integers ^ _BASE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _add(sums, codes, inputs, scale, minimum, OFFSET: tl.constexpr):
    """Few rows have fewer sums than weights, and these are scaled; else weights are scaled, rounded to 16 bits."""
    if OFFSET >= 2:
        return tl.dot((codes * scale[:, None] - minimum[:, None]).to(inputs.dtype), inputs, sums)
    elif inputs.shape[1] > 16:
        return tl.dot((codes * scale[:, None]).to(inputs.dtype), inputs, sums)
    else:
        return sums + tl.dot(codes.to(inputs.dtype), inputs) * scale[:, None]


@triton.jit
def multiply_packed(
    out,
    rows,
    packed,
    scales,
    halves,
    bias,
    num_rows,
    num_outputs,
    row_stride,
    block_bytes,
    num_steps,
    steps_per_part,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (r, n, p): TILE_ROWS rows of the input with TILE_OUTPUTS rows of weights, over the columns of part p.

    `scales` and `halves` are `packed` in the scales' type and in float16; out [parts, num_rows, num_outputs].
    """
    # Indices beyond the last one are those of the last: what they load is used by nothing that is stored.
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    part = tl.program_id(2)
    taken = tl.minimum(output, num_outputs - 1)
    block, lane = (taken // ROWS).to(tl.int64) * block_bytes, taken % ROWS

    is_super: tl.constexpr = SCALE_BYTES == 1  # int8 times a float16 of a cell of 256 columns
    groups: tl.constexpr = 256 // GROUP if is_super else 1
    offsets_at: tl.constexpr = ROWS * (2 * is_super + groups * SCALE_BYTES)
    codes_at: tl.constexpr = offsets_at + ROWS * (groups * (OFFSET > 0) + (OFFSET == 2) + 2 * (OFFSET == 3))
    steps_per_cell: tl.constexpr = groups * GROUP // STEP
    step_bytes: tl.constexpr = STEP * BITS // 8 * ROWS

    place = tl.arange(0, STEP if BITS == 8 else STEP // 2)
    codes = packed + block[:, None] + codes_at + lane[:, None] * 4 + (place // 4 * LINE + place % 4)[None, :]
    column = place
    if BITS != 8:
        column += place // 16 * 16
        codes += (place // 16 * ((BITS - 4) * LINE))[None, :]
        quad = (place % 16 // 4)[None, :]
        high = codes + (4 - quad) * LINE
    inputs = rows + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * row_stride + column[:, None]

    sums = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    for step in range(part * steps_per_part, tl.minimum((part + 1) * steps_per_part, num_steps)):
        cell = step // steps_per_cell * (codes_at + steps_per_cell * step_bytes)
        group = step % steps_per_cell * (STEP // GROUP) * ROWS + lane
        at = cell + step % steps_per_cell * step_bytes
        encoded = tl.load(codes + at).to(tl.int32)
        first = tl.load(inputs + step * STEP)
        scale = tl.load(scales + (block + cell + is_super * 2 * ROWS) // SCALE_BYTES + group).to(tl.float32)
        if is_super:
            super_scale = tl.load(halves + (block + cell) // 2 + lane).to(tl.float32)
            scale *= super_scale
        minimum = scale
        if OFFSET >= 2:
            minimum = tl.load(halves + (block + cell + offsets_at) // 2 + lane).to(tl.float32)
        if OFFSET == 3:
            minimum *= tl.load(packed + block + cell + offsets_at + 2 * ROWS + group).to(tl.float32)
        zero = ZERO + (128.0 if BITS == 8 else 0.0)
        if OFFSET == 1:
            zero = tl.load(packed + block + cell + offsets_at + group).to(tl.float32)[:, None]
        if BITS == 8:
            sums = _add(sums, _number(encoded ^ 128) - (zero + _BASE), first, scale, minimum, OFFSET)
        else:
            low, upper = encoded & 15, encoded & 240
            if BITS == 5:
                more = tl.load(high + at).to(tl.int32) >> quad
                low |= (more & 1) << 4
                upper |= (more & 16) << 4
            if BITS == 6:
                low |= (tl.load(high + at).to(tl.int32) >> 2 * quad & 3) << 4
                upper |= (tl.load(high + (at + LINE)).to(tl.int32) >> 2 * quad & 3) << 8
            sums = _add(sums, _number(low) - (zero + _BASE), first, scale, minimum, OFFSET)
            if GROUP == 16:
                scale = tl.load(scales + (block + cell + 2 * ROWS) + group + ROWS).to(tl.float32) * super_scale
            second = tl.load(inputs + (step * STEP + 16))
            sums = _add(sums, _number(upper) / 16 - (zero + _BASE / 16), second, scale, minimum, OFFSET)

    stored = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    element = (part.to(tl.int64) * num_rows + row)[None, :] * num_outputs + output[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + taken).to(tl.float32)[:, None]
    tl.store(out + element, sums.to(out.dtype.element_ty), mask=stored)


@triton.jit
def add_up_parts(
    out, parts, bias, num_elements, num_outputs, num_parts, ELEMENTS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Program e: the sums of all parts for ELEMENTS elements of the output."""
    element = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    stored = element < num_elements
    sums = tl.zeros((ELEMENTS,), tl.float32)
    for part in range(num_parts):
        sums += tl.load(parts + part * num_elements + element, mask=stored)
    if HAS_BIAS:
        sums += tl.load(bias + element % num_outputs, mask=stored).to(tl.float32)
    tl.store(out + element, sums.to(out.dtype.element_ty), mask=stored)
