"""Products of rows with a packed matrix of integers, whose layout `triton_ops.packed` describes.

A line of 64 bytes is a word of 32 bits for each of 16 rows of weights, so threads side by side load
what lies side by side. The order of columns within a product is free: the same byte, or half of a
byte, of all words of a step is a vector of codes, and the columns of the input that they meet are
gathered.
"""

import triton
import triton.language as tl

ROWS = tl.constexpr(16)  # rows of weights that are packed together
_BASE = tl.constexpr(8388608.0)
# those of 2^23, whose lowest bits are an integer that is added to it
_BASE_BITS = tl.constexpr(0x4B000000)


@triton.jit
def _load_step(
    words, scales, halves, numbers, block, lane, stored, begin, num_columns,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Load the STEP columns from `begin` on: words, the words of their fifth and sixth bits, the
    scales of both halves of 32 columns, what is subtracted from weights in both, and what is
    subtracted from codes."""
    lines: tl.constexpr = 8 if BITS == 8 else 4
    is_super: tl.constexpr = SCALE_BYTES == 1  # int8 times a float16 of a cell of 256 columns
    span: tl.constexpr = 256 if is_super else GROUP
    groups: tl.constexpr = span // GROUP
    offsets_at: tl.constexpr = ROWS * (2 * is_super + groups * SCALE_BYTES)
    codes_at: tl.constexpr = offsets_at + ROWS * (
        groups * (OFFSET > 0) + (OFFSET == 2) + 2 * (OFFSET == 3)
    )
    cell_quads: tl.constexpr = (codes_at + span * BITS // 8 * ROWS) // 16

    place = tl.arange(0, STEP // 32 * lines)
    column = begin + place // lines * 32
    loaded = stored[:, None] & (column < num_columns)[None, :]
    cell, within = column // span, column % span
    if span % STEP == 0:
        cell, within = begin // span + place * 0, begin % span + place // lines * 32
    first = cell * cell_quads * 4 + codes_at // 16 * 4 + within // 32 * BITS * 16
    at = block[:, None] * 4 + lane[:, None] + first[None, :]
    found = tl.load(words + at + (place % lines * 16)[None, :], mask=loaded, other=0)
    more, last = found, found
    if BITS == 5 or BITS == 6:
        more = tl.load(words + (at + 64), mask=loaded, other=0)
    if BITS == 6:
        last = tl.load(words + (at + 80), mask=loaded, other=0)

    spot = tl.arange(0, 1) if GROUP % STEP == 0 else place
    column = begin + spot // lines * 32
    cell, group = column // span, column % span // GROUP
    loaded = stored[:, None] & (column < num_columns)[None, :]
    base = block[:, None] * 16 + (cell * cell_quads * 16)[None, :]
    at = (base + is_super * 2 * ROWS) // SCALE_BYTES + group[None, :] * ROWS + lane[:, None]
    scale = tl.load(scales + at, mask=loaded, other=0).to(tl.float32)
    super_scale = 1.0
    if is_super:
        super_scale = tl.load(halves + base // 2 + lane[:, None], mask=loaded, other=0).to(
            tl.float32
        )
    scale *= super_scale
    second = scale
    if GROUP == 16:
        second = tl.load(scales + (at + ROWS), mask=loaded, other=0).to(tl.float32) * super_scale
    zero = ZERO + (128.0 if BITS == 8 else 0.0) + _BASE
    minimum, second_minimum = scale, scale
    of_group = numbers + base + offsets_at + group[None, :] * ROWS + lane[:, None]
    if OFFSET == 1:
        zero = tl.load(of_group, mask=loaded, other=0).to(tl.float32) + _BASE
    if OFFSET >= 2:
        minimum = tl.load(
            halves + (base + offsets_at) // 2 + lane[:, None], mask=loaded, other=0
        ).to(tl.float32)
        second_minimum = minimum
    if OFFSET == 3:
        super_minimum = minimum
        minimum *= tl.load(of_group + 2 * ROWS, mask=loaded, other=0).to(tl.float32)
        second_minimum = minimum
        if GROUP == 16:
            following = tl.load(of_group + 3 * ROWS, mask=loaded, other=0).to(tl.float32)
            second_minimum = super_minimum * following
    return found, more, last, scale, second, minimum, second_minimum, zero


@triton.jit
def _weights(
    word, more, last, place, scale, minimum, zero, byte: tl.constexpr, half: tl.constexpr,
    BITS: tl.constexpr, OFFSET: tl.constexpr, IS_SCALED: tl.constexpr,
):  # fmt: skip
    """The weights of one byte of each word, or of half of it, in float32; without their scales
    unless IS_SCALED. Scales and minimums are those of this half."""
    if BITS == 8:
        code = (word >> 8 * byte & 255) ^ 128
    else:
        code = word >> (8 * byte + 4 * half) & 15
        if BITS == 5:
            code |= (more >> (8 * byte + 4 * half + place % 4)[None, :] & 1) << 4
        if BITS == 6:
            code |= ((last if half else more) >> (8 * byte + 2 * (place % 4))[None, :] & 3) << 4
    # An integer below 2^23 plus 2^23 as float32 is cheaper than a conversion.
    number = (code ^ _BASE_BITS).to(tl.float32, bitcast=True) - zero
    if OFFSET >= 2:
        return number * scale - minimum
    if IS_SCALED:
        return number * scale
    return number


@triton.jit
def multiply_row(
    out, rows, words, scales, halves, numbers, bias, num_outputs, num_columns, num_rows,
    row_stride, block_quads, steps_per_part,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr, TILE_OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (r, n, p): row r of the input with TILE_OUTPUTS rows of weights, over the columns of
    part p.

    `words`, `scales`, `halves` and `numbers` are the packed matrix as int32, in the scales' type,
    float16 and uint8; block_quads: 16 bytes of 16 rows of weights; out [parts, num_rows,
    num_outputs].
    """
    row = tl.program_id(0)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    part = tl.program_id(2)
    block, lane = (output // ROWS).to(tl.int64) * block_quads, output % ROWS
    stored = output < tl.cdiv(num_outputs, ROWS) * ROWS
    lines: tl.constexpr = 8 if BITS == 8 else 4
    place = tl.arange(0, STEP // 32 * lines)
    is_uniform: tl.constexpr = GROUP % STEP == 0
    first = place * 4 if BITS == 8 else place // 4 * 32 + place % 4 * 4
    inputs = rows + row.to(tl.int64) * row_stride + first
    sums = tl.zeros((TILE_OUTPUTS, STEP // 32 * lines), tl.float32)
    for step in range(
        part * steps_per_part, tl.minimum((part + 1) * steps_per_part, tl.cdiv(num_columns, STEP))
    ):
        begin = step * STEP
        word, more, last, scale, second, minimum, second_minimum, zero = _load_step(
            words, scales, halves, numbers, block, lane, stored, begin, num_columns,
            BITS, GROUP, ZERO, OFFSET, SCALE_BYTES, STEP,
        )  # fmt: skip
        inside = begin + place // lines * 32 < num_columns
        partial = tl.zeros((TILE_OUTPUTS, STEP // 32 * lines), tl.float32)
        for half in tl.static_range(1 if BITS == 8 else 2):
            half_scale = second if half else scale
            half_minimum = second_minimum if half else minimum
            for byte in tl.static_range(4):
                input = tl.load(inputs + (begin + 16 * half + byte), mask=inside, other=0).to(
                    tl.float32
                )
                partial += input[None, :] * _weights(
                    word, more, last, place, half_scale, half_minimum, zero, byte, half,
                    BITS, OFFSET, not is_uniform,
                )  # fmt: skip
        if is_uniform and OFFSET < 2:
            partial *= scale
        sums += partial
    total = tl.sum(sums, 1)
    kept = output < num_outputs
    if HAS_BIAS:
        total += tl.load(bias + output, mask=kept, other=0).to(tl.float32)
    element = (part.to(tl.int64) * num_rows + row) * num_outputs + output
    tl.store(out + element, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def multiply_packed(
    out, rows, words, scales, halves, numbers, bias, num_outputs, num_columns, num_rows,
    row_stride, block_quads, steps_per_part,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Program (r, n, p): as `multiply_row`, but TILE_ROWS rows of the input, whose weights are
    rounded to its type."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    part = tl.program_id(2)
    block, lane = (output // ROWS).to(tl.int64) * block_quads, output % ROWS
    stored = output < tl.cdiv(num_outputs, ROWS) * ROWS
    lines: tl.constexpr = 8 if BITS == 8 else 4
    place = tl.arange(0, STEP // 32 * lines)
    is_uniform: tl.constexpr = GROUP % STEP == 0 and OFFSET < 2 and TILE_ROWS <= 16
    first = place * 4 if BITS == 8 else place // 4 * 32 + place % 4 * 4
    inputs = rows + row.to(tl.int64)[None, :] * row_stride + first[:, None]
    sums = tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
    for step in range(
        part * steps_per_part, tl.minimum((part + 1) * steps_per_part, tl.cdiv(num_columns, STEP))
    ):
        begin = step * STEP
        word, more, last, scale, second, minimum, second_minimum, zero = _load_step(
            words, scales, halves, numbers, block, lane, stored, begin, num_columns,
            BITS, GROUP, ZERO, OFFSET, SCALE_BYTES, STEP,
        )  # fmt: skip
        inside = (begin + place // lines * 32 < num_columns)[:, None] & (row < num_rows)[None, :]
        partial = sums if not is_uniform else tl.zeros((TILE_OUTPUTS, TILE_ROWS), tl.float32)
        for half in tl.static_range(1 if BITS == 8 else 2):
            half_scale = second if half else scale
            half_minimum = second_minimum if half else minimum
            for byte in tl.static_range(4):
                input = tl.load(inputs + (begin + 16 * half + byte), mask=inside, other=0)
                weights = _weights(
                    word, more, last, place, half_scale, half_minimum, zero, byte, half,
                    BITS, OFFSET, not is_uniform,
                )  # fmt: skip
                partial = tl.dot(weights.to(input.dtype), input, partial)
        sums = sums + partial * scale if is_uniform else partial
    kept = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    element = (part.to(tl.int64) * num_rows + row)[None, :] * num_outputs + output[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < num_outputs, other=0).to(tl.float32)[:, None]
    tl.store(out + element, sums.to(out.dtype.element_ty), mask=kept)


@triton.jit
def unpack_matrix(
    out, words, scales, halves, numbers, num_outputs, num_columns, block_quads,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, OFFSET: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    STEP: tl.constexpr, TILE_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Program (c, n): STEP columns of TILE_OUTPUTS rows of the matrix itself; out [num_outputs,
    num_columns]."""
    begin = tl.program_id(0) * STEP
    output = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    block, lane = (output // ROWS).to(tl.int64) * block_quads, output % ROWS
    stored = output < num_outputs
    lines: tl.constexpr = 8 if BITS == 8 else 4
    place = tl.arange(0, STEP // 32 * lines)
    word, more, last, scale, second, minimum, second_minimum, zero = _load_step(
        words, scales, halves, numbers, block, lane, stored, begin, num_columns,
        BITS, GROUP, ZERO, OFFSET, SCALE_BYTES, STEP,
    )  # fmt: skip
    targets = out + output.to(tl.int64)[:, None] * num_columns
    quad = tl.arange(0, STEP // 32 * lines * 4)
    for half in tl.static_range(1 if BITS == 8 else 2):
        half_scale = second if half else scale
        half_minimum = second_minimum if half else minimum
        column = begin + (quad if BITS == 8 else quad // 16 * 32 + quad % 16 + half * 16)
        first = _weights(
            word, more, last, place, half_scale, half_minimum, zero, 0, half,
            BITS, OFFSET, True,
        )  # fmt: skip
        after = _weights(
            word, more, last, place, half_scale, half_minimum, zero, 1, half,
            BITS, OFFSET, True,
        )  # fmt: skip
        third = _weights(
            word, more, last, place, half_scale, half_minimum, zero, 2, half,
            BITS, OFFSET, True,
        )  # fmt: skip
        fourth = _weights(
            word, more, last, place, half_scale, half_minimum, zero, 3, half,
            BITS, OFFSET, True,
        )  # fmt: skip
        # Side by side, the four columns of a word are stored together.
        weights = tl.reshape(
            tl.join(tl.join(first, third), tl.join(after, fourth)),
            (TILE_OUTPUTS, STEP // 8 * lines),
        )
        kept = stored[:, None] & (column < num_columns)[None, :]
        tl.store(targets + column[None, :], weights.to(out.dtype.element_ty), mask=kept)


@triton.jit
def add_up_parts(
    out,
    parts,
    bias,
    num_elements,
    num_outputs,
    num_parts,
    ELEMENTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
