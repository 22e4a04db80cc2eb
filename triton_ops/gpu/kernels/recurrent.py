"""Layers with a recurrent state: the short causal convolution, and the gated delta rule one token
at a time or in chunks.

Segments of one row depend on each other, so the programs of a row's first segment compute its later
ones too, in order, and the programs of later segments end at once. They tell a row's segments from
the table alone: a segment goes on where the one before it ended, with the state that it left. So
the host need not know which segments are a row.

Tensors are those of `triton_ops.recurrent`, strides count elements, every last dimension is
contiguous, and a slot's state is contiguous. Sizes that are no power of two are padded to one with
masks: what is masked counts as zero, and changes neither state nor sums.

States are float32, and everything is computed in float32. Where a product of matrices takes part,
the matrix units get numbers of 16 bits: a float32 factor is the sum of two of them, whose error is
a 2^-16th for bfloat16. Tensors that are float32 themselves are computed one token at a time, which
takes no matrix products.

Least times: of single tokens, the bytes of the states read and written over the bandwidth of
memory; of chunks, the operations of their products over the peak of matrix products.
"""

import triton
import triton.language as tl

SEGMENT_FIELDS = tl.constexpr(5)
BLOCK = tl.constexpr(16)
"""Rows of a triangular system that are solved one after another; blocks are solved by products."""
_NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def _load_segment(segments, index):
    """Its first token, end token, source slot and target slot, and the position of its first
    token."""
    fields = segments + index * SEGMENT_FIELDS
    source, target = tl.load(fields + 2).to(tl.int64), tl.load(fields + 3).to(tl.int64)
    return tl.load(fields), tl.load(fields + 1), source, target, tl.load(fields + 4)


@triton.jit
def _continues(segments, index, num_segments):
    """Whether there is a segment with this index and it belongs to the row of the one before it."""
    is_later = (index > 0) & (index < num_segments)
    fields = segments + index * SEGMENT_FIELDS
    before = fields - SEGMENT_FIELDS
    begin = tl.load(fields, mask=is_later, other=0)
    source = tl.load(fields + 2, mask=is_later, other=-1)
    end_before = tl.load(before + 1, mask=is_later, other=0)
    target_before = tl.load(before + 3, mask=is_later, other=-1)
    return is_later & (begin == end_before) & (source >= 0) & (source == target_before)


@triton.jit
def _is_single(segments, index, num_segments):
    """Whether a segment is a row of its own, of at most one token."""
    begin, end, _, _, _ = _load_segment(segments, index)
    is_row = ~_continues(segments, index, num_segments)
    return (end - begin <= 1) & is_row & ~_continues(segments, index + 1, num_segments)


@triton.jit
def _load_seen(inputs, before, place, begin, source, inputs_stride, used, KEPT: tl.constexpr):
    """Inputs of the tokens `place`, [1, N] or [N, 1], in float32: of a segment that starts at token
    `begin`, or of its KEPT predecessors, which the state of slot `source` holds.

    `inputs` and `before` point to the channels, [C, 1] or [1, C], of token 0 and of that state.
    """
    is_new = place >= begin
    new = tl.load(inputs + place.to(tl.int64) * inputs_stride, mask=used & is_new, other=0.0)
    is_kept = used & (place < begin) & (source >= 0)
    old = tl.load(before + (place - begin + KEPT), mask=is_kept, other=0.0)
    return tl.where(is_new, new.to(tl.float32), old.to(new.dtype).to(tl.float32))


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def convolve(
    out,
    inputs,
    weight,
    bias,
    states,
    segments,
    num_segments,
    num_channels,
    out_stride,
    inputs_stride,
    slot_stride,
    KERNEL_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Program (n, c): the row whose first segment is n, in CHANNELS channels, TOKENS tokens at a
    time. COLUMNS of a state, as a power of two."""
    index = tl.program_id(0)
    if _continues(segments, index, num_segments):
        return
    kept: tl.constexpr = KERNEL_SIZE - 1
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < num_channels
    column = tl.arange(0, COLUMNS)
    is_row = True
    while is_row:
        begin, end, source, target, _ = _load_segment(segments, index)
        before = states + source * slot_stride + channel * kept
        for first in range(begin, end, TOKENS):
            token = (first + tl.arange(0, TOKENS))[:, None]
            used = (token < end) & exists[None, :]
            sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
            if HAS_BIAS:
                sums += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)[None, :]
            for place in tl.static_range(KERNEL_SIZE):
                seen = _load_seen(
                    (inputs + channel)[None, :],
                    before[None, :],
                    token - kept + place,
                    begin,
                    source,
                    inputs_stride,
                    used,
                    kept,
                )
                of_place = tl.load(weight + channel * KERNEL_SIZE + place, mask=exists, other=0.0)
                sums += seen * of_place.to(tl.float32)[None, :]
            if SILU:
                sums = sums * tl.sigmoid(sums)
            tl.store(
                out + token.to(tl.int64) * out_stride + channel[None, :],
                sums.to(out.dtype.element_ty),
                mask=used,
            )
        used = (column < kept)[None, :] & exists[:, None]
        newest = _load_seen(
            (inputs + channel)[:, None],
            before[:, None],
            (end - kept + column)[None, :],
            begin,
            source,
            inputs_stride,
            used,
            kept,
        )
        tl.debug_barrier()  # a state may be written to the slot that other threads still read
        after = states + target * slot_stride + channel[:, None] * kept + column[None, :]
        tl.store(after, newest.to(states.dtype.element_ty), mask=used)
        tl.debug_barrier()  # and be read by the next segment
        index += 1
        is_row = _continues(segments, index, num_segments)


@triton.jit
def _load_heads(heads, used, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr):
    """Heads [tokens, PADDED_HEAD_DIM] that begin at `heads` [tokens], and what scales them to
    length 1, [tokens] in float32. Heads are zero where a token is not used."""
    dims = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    found = tl.load(heads[:, None] + dims, mask=used[:, None] & (dims < HEAD_DIM), other=0.0)
    exact = found.to(tl.float32)
    return found, tl.rsqrt(tl.sum(exact * exact, 1) + _NORM_EPS)


@triton.jit
def _load_unit(head, HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr):
    """One head as a column [PADDED_HEAD_DIM, 1] of length 1, in float32."""
    dims = tl.arange(0, PADDED_HEAD_DIM)
    exact = tl.load(head + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    return (exact * tl.rsqrt(tl.sum(exact * exact, 0) + _NORM_EPS))[:, None]


@triton.jit
def _state_tile(
    head, column, KEY_DIM: tl.constexpr, PADDED_KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Offsets in a slot of the state's columns `column` for a value head, [PADDED_KEY_DIM,
    columns], and which of them exist."""
    row = tl.arange(0, PADDED_KEY_DIM)[:, None]
    offsets = (head * KEY_DIM + row) * VALUE_DIM + column[None, :]
    return offsets, (row < KEY_DIM) & (column < VALUE_DIM)[None, :]


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def step_delta_rule(
    out,
    query,
    key,
    value,
    decay,
    beta,
    states,
    segments,
    num_segments,
    out_stride,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    beta_stride,
    slot_stride,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONLY_SINGLE: tl.constexpr,
):
    """Program (n, h, c): the row whose first segment is n, in value head h and COLUMNS columns of
    its values, token by token. SHARED value heads have one key head.

    With ONLY_SINGLE, rows of more than one token are left to `scan_delta_rule`.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    begin, end, source, target, _ = _load_segment(segments, index)
    is_left = _continues(segments, index, num_segments)
    if ONLY_SINGLE:
        is_left |= ~_is_single(segments, index, num_segments)
    if is_left:
        return
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_key = head // SHARED * KEY_DIM
    offsets, exists = _state_tile(head, column, KEY_DIM, PADDED_KEY_DIM, VALUE_DIM)
    from_slot = states + source * slot_stride + offsets
    state = tl.load(from_slot, mask=exists & (source >= 0), other=0.0)
    is_row = True
    while is_row:
        begin, end, source, target, _ = _load_segment(segments, index)
        for number in range(begin, end):
            token = tl.cast(number, tl.int64)
            unit_key = _load_unit(key + token * key_stride + of_key, KEY_DIM, PADDED_KEY_DIM)
            unit_query = _load_unit(query + token * query_stride + of_key, KEY_DIM, PADDED_KEY_DIM)
            unit_query *= KEY_DIM**-0.5
            in_head = head * VALUE_DIM + column
            exact = tl.load(
                value + token * value_stride + in_head, mask=column < VALUE_DIM, other=0.0
            ).to(tl.float32)
            state *= tl.exp(tl.load(decay + token * decay_stride + head))[:, None]
            rate = tl.load(beta + token * beta_stride + head)
            correction = rate * (exact - tl.sum(state * unit_key, 0))
            state += unit_key * correction[None, :]
            tl.store(
                out + token * out_stride + in_head,
                tl.sum(state * unit_query, 0).to(out.dtype.element_ty),
                mask=column < VALUE_DIM,
            )
        tl.debug_barrier()  # a state may be written to the slot that it was read from
        tl.store(states + target * slot_stride + offsets, state, mask=exists)
        index += 1
        is_row = _continues(segments, index, num_segments)


@triton.jit
def _invert_diagonal_blocks(system, CHUNK: tl.constexpr):
    """The inverse of the identity plus the diagonal blocks of `system`, [CHUNK, CHUNK], which is
    zero on and above its diagonal. Forward substitution, one row of all blocks at a time."""
    blocks: tl.constexpr = CHUNK // BLOCK
    number, row = tl.arange(0, blocks), tl.arange(0, BLOCK)
    is_diagonal = (number[:, None] == number[None, :])[:, None, :, None]
    in_blocks = tl.reshape(system, [blocks, BLOCK, blocks, BLOCK])
    lower = tl.sum(tl.where(is_diagonal, in_blocks, 0.0), 2)
    identity = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    inverse = tl.broadcast_to(identity, [blocks, BLOCK, BLOCK])
    for solved in range(1, BLOCK):
        is_solved = (row == solved)[None, :, None]
        factors = tl.sum(tl.where(is_solved, lower, 0.0), 1)
        known = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(is_solved, inverse - known[:, None, :], inverse)
    spread = tl.where(is_diagonal, inverse[:, :, None, :], 0.0)
    return tl.reshape(spread, [CHUNK, CHUNK])


@triton.jit
def _split(exact, DTYPE: tl.constexpr):
    """A float32 tensor as a sum of two of a 16-bit type."""
    high = exact.to(DTYPE)
    return high, (exact - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _multiply(left, right):
    """The product of two tensors that are split in two, but for that of the lower parts."""
    left_high, left_low = left
    right_high, right_low = right
    product = tl.dot(left_low, right_high)
    product = tl.dot(left_high, right_low, product)
    return tl.dot(left_high, right_high, product)


@triton.jit
def _multiply_half(left, right):
    """The product of a tensor of a 16-bit type and one that is split in two."""
    high, low = right
    return tl.dot(left, high, tl.dot(left, low))


@triton.jit
def _invert(system, CHUNK: tl.constexpr, DTYPE: tl.constexpr):
    """The inverse of the identity plus `system`, [CHUNK, CHUNK], which is zero on and above its
    diagonal.

    Forward substitution by blocks. Every pass makes one row of blocks more of the inverse final,
    and what the rows below it held before has no part in that.
    """
    block = tl.arange(0, CHUNK) // BLOCK
    of_blocks = _invert_diagonal_blocks(system, CHUNK)
    below = tl.where(block[:, None] > block[None, :], system, 0.0)
    product = _multiply(_split(of_blocks, DTYPE), _split(below, DTYPE))
    factor = _split(product, DTYPE)
    inverse = of_blocks
    for _ in range(1, CHUNK // BLOCK):
        inverse = of_blocks - _multiply(factor, _split(inverse, DTYPE))
    return inverse


@triton.jit
def _find_chunk(segments, num_segments, number, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """The segment of a chunk, and which of its chunks it is, when the chunks of all segments are
    numbered in order. The segment is `num_segments` if there are not so many.

    A segment of n tokens has at most n // CHUNK + 2, for it may begin and end within a chunk: so
    the host knows how many programs are enough without knowing where segments lie.
    """
    index, done, counted = 0, 0, 0
    for first in range(0, num_segments, STEP):
        places = first + tl.arange(0, STEP)
        exists = places < num_segments
        fields = segments + places * SEGMENT_FIELDS
        begin = tl.load(fields, mask=exists, other=0)
        end = tl.load(fields + 1, mask=exists, other=0)
        position = tl.load(fields + 4, mask=exists, other=0)
        chunks = tl.cdiv(position % CHUNK + end - begin, CHUNK)
        is_before = exists & (counted + tl.cumsum(chunks, 0) <= number)
        index += tl.sum(is_before.to(tl.int32), 0)
        done += tl.sum(tl.where(is_before, chunks, 0), 0)
        counted += tl.sum(chunks, 0)
    return index, number - done


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def prepare_chunks(
    prepared,
    query,
    key,
    decay,
    beta,
    segments,
    num_segments,
    prepared_stride,
    query_stride,
    key_stride,
    decay_stride,
    beta_stride,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (c, h, m): matrix m that the scan needs for chunk c in value head h. It does not
    depend on the state, so all chunks are computed at once.

    Matrix 0 is the inverse of the triangular system times the rates, which makes corrections of
    what the state lacks; matrix 1 the scores, which weigh corrections. prepared: [T,
    num_value_heads, 4, CHUNK], each token's rows of both, split in two. There may be more
    programs than chunks, not fewer.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    index, of_segment = _find_chunk(segments, num_segments, number, CHUNK, 32)
    if index == num_segments:
        return
    if _is_single(segments, index, num_segments):
        return
    begin, end, _, _, position = _load_segment(segments, index)
    first = begin - position % CHUNK + of_segment * CHUNK
    row = tl.arange(0, CHUNK)
    token = (first + row).to(tl.int64)
    used = (token >= begin) & (token < end)
    of_key = head // SHARED * KEY_DIM
    keys, key_scale = _load_heads(key + token * key_stride + of_key, used, KEY_DIM, PADDED_KEY_DIM)
    total = tl.cumsum(tl.load(decay + token * decay_stride + head, mask=used, other=0.0), 0)
    later = total[:, None] - total[None, :]
    factors = tl.exp(tl.where(row[:, None] >= row[None, :], later, float("-inf")))
    factors *= key_scale[None, :]
    rows = prepared + token * prepared_stride + head * 4 * CHUNK
    if tl.program_id(2) == 0:
        rate = tl.load(beta + token * beta_stride + head, mask=used, other=0.0)
        similar = tl.dot(keys, tl.trans(keys)) * factors * (rate * key_scale)[:, None]
        system = tl.where(row[:, None] > row[None, :], similar, 0.0)
        _store_split(rows, used, _invert(system, CHUNK, keys.dtype) * rate[None, :], CHUNK)
    else:
        queries, query_scale = _load_heads(
            query + token * query_stride + of_key, used, KEY_DIM, PADDED_KEY_DIM
        )
        query_scale *= KEY_DIM**-0.5
        scores = tl.dot(queries, tl.trans(keys)) * factors * query_scale[:, None]
        _store_split(rows + 2 * CHUNK, used, scores, CHUNK)


@triton.jit
def _store_split(rows, used, exact, CHUNK: tl.constexpr):
    """Store a matrix [CHUNK, CHUNK] split in two, at `rows` [CHUNK] and after them."""
    places = rows[:, None] + tl.arange(0, CHUNK)[None, :]
    high, low = _split(exact, rows.dtype.element_ty)
    tl.store(places, high, mask=used[:, None])
    tl.store(places + CHUNK, low, mask=used[:, None])


@triton.jit
def _load_split(rows, used, CHUNK: tl.constexpr):
    """Load what `_store_split` stored; rows that are not used are zero."""
    places = rows[:, None] + tl.arange(0, CHUNK)[None, :]
    high = tl.load(places, mask=used[:, None], other=0.0)
    return high, tl.load(places + CHUNK, mask=used[:, None], other=0.0)


@triton.jit
def _scan_chunk(state, query, key, value, decay, inverse, scores, CHUNK: tl.constexpr):
    """Outputs [CHUNK, columns] and the state after a chunk of positions, as
    `triton_ops.recurrent.delta_rule_chunk` has them. A position of zeros changes nothing.

    `query` and `key` are pairs: heads as they were given, and what scales them to their lengths.
    The matrices of `prepare_chunks` are split in two.
    """
    key, key_scale = key
    query, query_scale = query
    dtype: tl.constexpr = key.dtype
    total = tl.cumsum(decay, 0)
    grown = tl.exp(total)
    before = _split(state, dtype)
    rest = value - _multiply_half(key, before) * (grown * key_scale)[:, None]
    output = _multiply_half(query, before) * (grown * query_scale)[:, None]
    corrections = _multiply(inverse, _split(rest, dtype))
    output += _multiply(scores, _split(corrections, dtype))
    last = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, total, 0.0), 0)
    left = corrections * (tl.exp(last - total) * key_scale)[:, None]
    state = state * tl.exp(last) + _multiply_half(tl.trans(key), _split(left, dtype))
    return output, state


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def scan_delta_rule(
    out,
    query,
    key,
    value,
    decay,
    prepared,
    states,
    segments,
    num_segments,
    out_stride,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    prepared_stride,
    slot_stride,
    SHARED: tl.constexpr,
    KEY_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (n, h, c): the row whose first segment is n, in value head h and COLUMNS columns of
    its values, in chunks that begin at multiples of CHUNK.

    `prepared` is what `prepare_chunks` left. Rows of one token are left to `step_delta_rule`.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    begin, end, source, target, position = _load_segment(segments, index)
    is_later = _continues(segments, index, num_segments)
    if is_later | _is_single(segments, index, num_segments):
        return
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    of_key, in_head = head // SHARED * KEY_DIM, (head * VALUE_DIM + column)[None, :]
    offsets, exists = _state_tile(head, column, KEY_DIM, PADDED_KEY_DIM, VALUE_DIM)
    from_slot = states + source * slot_stride + offsets
    state = tl.load(from_slot, mask=exists & (source >= 0), other=0.0)
    is_row = True
    while is_row:
        begin, end, source, target, position = _load_segment(segments, index)
        for first in range(begin - position % CHUNK, end, CHUNK):
            token = (first + tl.arange(0, CHUNK)).to(tl.int64)
            used = (token >= begin) & (token < end)
            stored = used[:, None] & (column < VALUE_DIM)[None, :]
            rows = prepared + token * prepared_stride + head * 4 * CHUNK
            values = value + token[:, None] * value_stride + in_head
            queries, query_scale = _load_heads(
                query + token * query_stride + of_key, used, KEY_DIM, PADDED_KEY_DIM
            )
            output, state = _scan_chunk(
                state,
                (queries, query_scale * KEY_DIM**-0.5),
                _load_heads(key + token * key_stride + of_key, used, KEY_DIM, PADDED_KEY_DIM),
                tl.load(values, mask=stored, other=0.0).to(tl.float32),
                tl.load(decay + token * decay_stride + head, mask=used, other=0.0),
                _load_split(rows, used, CHUNK),
                _load_split(rows + 2 * CHUNK, used, CHUNK),
                CHUNK,
            )
            target_rows = out + token[:, None] * out_stride + in_head
            tl.store(target_rows, output.to(out.dtype.element_ty), mask=stored)
        tl.debug_barrier()  # a state may be written to the slot that it was read from
        tl.store(states + target * slot_stride + offsets, state, mask=exists)
        index += 1
        is_row = _continues(segments, index, num_segments)
