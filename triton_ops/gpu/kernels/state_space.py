"""State-space layers: the recurrence of Mamba-2 one token at a time or in chunks, and the selective
scan of Mamba.

Rows, segments and slots are those of `triton_ops.gpu.kernels.recurrent`, and so is the precision:
states are float32, and where a product of matrices takes part, a float32 factor is the sum of two
numbers of 16 bits. Sizes that are no power of two are padded to one with masks: what is masked
counts as zero, and changes neither state nor sums. Strides count elements, every last dimension is
contiguous, and so is a slot's state.

Least times: of single tokens, the bytes of the states read and written over the bandwidth of
memory; of chunks, the operations of their products over the peak of matrix products; of a prompt's
selective scan, one exponential for each position and number of the state.
"""

import triton
import triton.language as tl

from triton_ops.gpu.kernels.recurrent import (
    _continues,
    _find_chunk,
    _is_single,
    _load_segment,
    _multiply_half,
    _split,
    _state_tile,
)

_STEPS_OF_DECAYS = tl.constexpr(256.0)
_LEAST_DECAY = tl.constexpr(-104.0)
"""The exponential of anything below is 0 in float32."""
_LEAST_FACTOR = tl.constexpr(1e-30)
"""The inverse of much smaller numbers is infinite in float32."""


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def step_dual(
    out,
    query,
    key,
    value,
    decay,
    time_step,
    states,
    segments,
    num_segments,
    out_stride,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    time_step_stride,
    slot_stride,
    SHARED: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONLY_SINGLE: tl.constexpr,
):
    """Program (n, h, c): the row whose first segment is n, in head h and COLUMNS columns of its
    values, token by token. SHARED heads are a group, with one query and key.

    With ONLY_SINGLE, rows of more than one token are left to `scan_dual`.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    begin, end, source, target, _ = _load_segment(segments, index)
    is_left = _continues(segments, index, num_segments)
    if ONLY_SINGLE:
        is_left |= ~_is_single(segments, index, num_segments)
    if is_left:
        return
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, PADDED_STATE_SIZE)
    in_group, in_head = head // SHARED * STATE_SIZE + number, head * HEAD_DIM + column
    offsets, exists = _state_tile(head, column, STATE_SIZE, PADDED_STATE_SIZE, HEAD_DIM)
    from_slot = states + source * slot_stride + offsets
    state = tl.load(from_slot, mask=exists & (source >= 0), other=0.0)
    is_row = True
    while is_row:
        begin, end, source, target, _ = _load_segment(segments, index)
        for place in range(begin, end):
            token = tl.cast(place, tl.int64)
            keys = _load_exact(key + token * key_stride + in_group, number < STATE_SIZE)
            queries = _load_exact(query + token * query_stride + in_group, number < STATE_SIZE)
            values = _load_exact(value + token * value_stride + in_head, column < HEAD_DIM)
            added = values * tl.load(time_step + token * time_step_stride + head)
            state *= tl.exp(tl.load(decay + token * decay_stride + head))
            state += keys[:, None] * added[None, :]
            tl.store(
                out + token * out_stride + in_head,
                tl.sum(state * queries[:, None], 0).to(out.dtype.element_ty),
                mask=column < HEAD_DIM,
            )
        tl.debug_barrier()  # a state may be written to the slot that it was read from
        tl.store(states + target * slot_stride + offsets, state, mask=exists)
        index += 1
        is_row = _continues(segments, index, num_segments)


@triton.jit
def _load_exact(places, exists):
    """Numbers in float32; zero where there is none."""
    return tl.load(places, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def _coarse_and_fine(decay):
    """Logarithms of decays as a sum of two numbers: multiples of a 256th, whose sums over a chunk
    are exact in float32, and what is left over. Differences of the sums of both are exact, where
    those of the sums of decays would lose what tells a position from the one before it."""
    decay = tl.maximum(decay, _LEAST_DECAY)
    coarse = tl.floor(decay * _STEPS_OF_DECAYS + 0.5) / _STEPS_OF_DECAYS
    return coarse, decay - coarse


@triton.jit
def _scaled_split(exact, AXIS: tl.constexpr, DTYPE: tl.constexpr):
    """A float32 matrix as a sum of two of a 16-bit type, and the factor that both were divided by.

    float16 has too few exponents for sums of products: numbers are divided by the largest along the
    axis.
    """
    factor = tl.full([1, 1], 1.0, tl.float32)
    if DTYPE.is_fp16():
        largest = tl.max(tl.abs(exact), AXIS, keep_dims=True)
        factor = tl.where(largest > _LEAST_FACTOR, largest, 1.0)
    high, low = _split(exact * (1.0 / factor), DTYPE)
    return high, low, factor


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def attend_in_chunks(
    local,
    query,
    key,
    value,
    decay,
    time_step,
    segments,
    num_segments,
    local_stride,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    time_step_stride,
    SHARED: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUMBERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (n, h, c): the part of the outputs of chunk n that comes from the chunk itself, in
    head h and COLUMNS columns of its values. It does not depend on the state, so all chunks are
    computed at once.

    local: float32 [T, num_heads, HEAD_DIM]. There may be more programs than chunks, not fewer.
    """
    head = tl.program_id(1)
    index, of_segment = _find_chunk(segments, num_segments, tl.program_id(0), CHUNK, 32)
    if index == num_segments:
        return
    if _is_single(segments, index, num_segments):
        return
    begin, end, _, _, position = _load_segment(segments, index)
    place = tl.arange(0, CHUNK)
    token = (begin - position % CHUNK + of_segment * CHUNK + place).to(tl.int64)
    used = (token >= begin) & (token < end)
    rows = token[:, None]
    similar = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in tl.static_range(0, PADDED_STATE_SIZE, NUMBERS):
        number = (first + tl.arange(0, NUMBERS))[None, :]
        in_group = head // SHARED * STATE_SIZE + number
        in_state = used[:, None] & (number < STATE_SIZE)
        keys = tl.load(key + rows * key_stride + in_group, mask=in_state, other=0.0)
        queries = tl.load(query + rows * query_stride + in_group, mask=in_state, other=0.0)
        similar = tl.dot(queries, tl.trans(keys), similar)
    coarse, fine = _coarse_and_fine(
        tl.load(decay + token * decay_stride + head, mask=used, other=0.0)
    )
    coarse, fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    later = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    later = tl.where(place[:, None] >= place[None, :], later, float("-inf"))
    steps = tl.load(time_step + token * time_step_stride + head, mask=used, other=0.0)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = (head * HEAD_DIM + column)[None, :]
    stored = used[:, None] & (column < HEAD_DIM)[None, :]
    values = tl.load(value + rows * value_stride + in_head, mask=stored, other=0.0)
    scores = similar * tl.exp(later) * steps[None, :]
    high, low, factor = _scaled_split(scores, 1, values.dtype)
    attended = tl.dot(high, values, tl.dot(low, values)) * factor
    tl.store(local + rows * local_stride + in_head, attended, mask=stored)


@triton.jit
def _scan_dual_chunk(state, query, key, value, decay, time_step):
    """The part of the outputs [positions, columns] that comes from the state, and the state after a
    chunk of positions. A position of zeros changes nothing."""
    coarse, fine = _coarse_and_fine(decay)
    coarse_last, fine_last = tl.sum(coarse, 0), tl.sum(fine, 0)
    coarse, fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    high, low, factor = _scaled_split(state, 0, query.dtype)
    found = _multiply_half(query, (high, low)) * factor * tl.exp(coarse + fine)[:, None]
    left = tl.exp((coarse_last - coarse) + (fine_last - fine)) * time_step
    added = value.to(tl.float32) * left[:, None]
    high, low, factor = _scaled_split(added, 0, query.dtype)
    state *= tl.exp(coarse_last + fine_last)
    return found, state + _multiply_half(tl.trans(key), (high, low)) * factor


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def scan_dual(
    out,
    query,
    key,
    value,
    decay,
    time_step,
    local,
    states,
    segments,
    num_segments,
    out_stride,
    query_stride,
    key_stride,
    value_stride,
    decay_stride,
    time_step_stride,
    local_stride,
    slot_stride,
    SHARED: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (n, h, c): the row whose first segment is n, in head h and COLUMNS columns of its
    values, in chunks that begin at multiples of CHUNK.

    `local` is what `attend_in_chunks` left. Rows of one token are left to `step_dual`.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    begin, end, source, target, position = _load_segment(segments, index)
    is_later = _continues(segments, index, num_segments)
    if is_later | _is_single(segments, index, num_segments):
        return
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, PADDED_STATE_SIZE)[None, :]
    in_group, in_head = head // SHARED * STATE_SIZE + number, (head * HEAD_DIM + column)[None, :]
    offsets, exists = _state_tile(head, column, STATE_SIZE, PADDED_STATE_SIZE, HEAD_DIM)
    from_slot = states + source * slot_stride + offsets
    state = tl.load(from_slot, mask=exists & (source >= 0), other=0.0)
    is_row = True
    while is_row:
        begin, end, source, target, position = _load_segment(segments, index)
        for first in range(begin - position % CHUNK, end, CHUNK):
            token = (first + tl.arange(0, CHUNK)).to(tl.int64)
            used = (token >= begin) & (token < end)
            in_state = used[:, None] & (number < STATE_SIZE)
            stored = used[:, None] & (column < HEAD_DIM)[None, :]
            rows = token[:, None]
            found, state = _scan_dual_chunk(
                state,
                tl.load(query + rows * query_stride + in_group, mask=in_state, other=0.0),
                tl.load(key + rows * key_stride + in_group, mask=in_state, other=0.0),
                tl.load(value + rows * value_stride + in_head, mask=stored, other=0.0),
                tl.load(decay + token * decay_stride + head, mask=used, other=0.0),
                tl.load(time_step + token * time_step_stride + head, mask=used, other=0.0),
            )
            found += tl.load(local + rows * local_stride + in_head, mask=stored, other=0.0)
            target_rows = out + rows * out_stride + in_head
            tl.store(target_rows, found.to(out.dtype.element_ty), mask=stored)
        tl.debug_barrier()  # a state may be written to the slot that it was read from
        tl.store(states + target * slot_stride + offsets, state, mask=exists)
        index += 1
        is_row = _continues(segments, index, num_segments)


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["segments"])
def scan_selectively(
    out,
    query,
    key,
    value,
    time_step,
    rates,
    states,
    segments,
    num_segments,
    num_channels,
    out_stride,
    query_stride,
    key_stride,
    value_stride,
    time_step_stride,
    slot_stride,
    STATE_SIZE: tl.constexpr,
    PADDED_STATE_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (n, c): the row whose first segment is n, in CHANNELS channels, token by token. The
    inputs of TOKENS tokens are loaded together, so that one waiting time is for all of them."""
    index = tl.program_id(0)
    if _continues(segments, index, num_segments):
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, PADDED_STATE_SIZE)
    in_state = (number < STATE_SIZE)[:, None] & (channel < num_channels)[None, :]
    offsets = channel[None, :] * STATE_SIZE + number[:, None]
    of_channels = tl.load(rates + offsets, mask=in_state, other=0.0)
    _, _, source, _, _ = _load_segment(segments, index)
    from_slot = states + source * slot_stride + offsets
    state = tl.load(from_slot, mask=in_state & (source >= 0), other=0.0)
    row = tl.arange(0, TOKENS)[:, None]
    is_row = True
    while is_row:
        begin, end, _, target, _ = _load_segment(segments, index)
        for first in range(begin, end, TOKENS):
            results = tl.zeros((TOKENS, CHANNELS), tl.float32)
            for place in tl.static_range(TOKENS):
                token = tl.cast(first + place, tl.int64)
                exists = (channel < num_channels) & (token < end)
                is_number = (number < STATE_SIZE) & (token < end)
                keys = _load_exact(key + token * key_stride + number, is_number)
                queries = _load_exact(query + token * query_stride + number, is_number)
                values = _load_exact(value + token * value_stride + channel, exists)
                # a token beyond the end has a step of 0, which changes nothing
                steps = _load_exact(time_step + token * time_step_stride + channel, exists)
                state *= tl.exp(of_channels * steps[None, :])
                state += keys[:, None] * (values * steps)[None, :]
                found = tl.sum(state * queries[:, None], 0)
                results = tl.where(row == place, found[None, :], results)
            token = (first + row).to(tl.int64)
            tl.store(
                out + token * out_stride + channel[None, :],
                results.to(out.dtype.element_ty),
                mask=(token < end) & (channel < num_channels)[None, :],
            )
        tl.debug_barrier()  # a state may be written to the slot that it was read from
        tl.store(states + target * slot_stride + offsets, state, mask=in_state)
        index += 1
        is_row = _continues(segments, index, num_segments)
