"""Norms and rotation of queries and keys, and the write of keys and values into the paged cache, in
one launch: the least time is the bytes read and written over the bandwidth of memory.

Pointers bear the names and shapes of the operator's arguments (`triton_ops.rotary`); strides count
elements, and last dimensions are contiguous. Numbers are float32 until they are stored, but are
rounded to the type of the heads where the plain operator's norm does so.

A head is loaded as three tiles, each padded to a power of two: the first and the second dimensions
of all pairs that turn, and the rest. Pair p is dimensions p * PAIR_STEP and p * PAIR_STEP +
PAIR_GAP, so the same code turns halves (a step of 1) and neighbours (a gap of 1).
"""

import triton
import triton.language as tl

from triton_ops.gpu.kernels.dependent import wait_for_previous_grid


@triton.jit
def normalize(numbers, scale, weight, dims, used, dtype: tl.constexpr, ADDS_ONE: tl.constexpr):
    """Multiply by the scale of each head and the weight of each dimension, float32 [HEADS, D]."""
    weights = tl.load(weight + dims, mask=used, other=0.0).to(tl.float32)
    if ADDS_ONE:
        return (numbers * scale * (1.0 + weights)).to(dtype).to(tl.float32)
    rounded = (numbers * scale).to(dtype).to(tl.float32)
    return (rounded * weights).to(dtype).to(tl.float32)


@triton.jit
def turn_heads(
    target,
    source,
    weight,
    cosines,
    sines,
    is_head,
    is_stored,
    eps,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    PAIR_GAP: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    ADDS_ONE: tl.constexpr,
):
    """Normalize and turn heads, and store them. target, source: pointers to the first dimension of
    each head, [HEADS, 1]; is_head, is_stored: which are read, and written; weight: that of the
    norm, or None."""
    dtype: tl.constexpr = source.dtype.element_ty
    has_rest: tl.constexpr = HEAD_DIM > 2 * NUM_PAIRS
    pairs = tl.arange(0, PAIRS)[None, :]
    is_pair = pairs < NUM_PAIRS
    first_dims = pairs * PAIR_STEP
    second_dims = first_dims + PAIR_GAP
    is_read = is_head & is_pair
    first = tl.load(source + first_dims, mask=is_read, other=0.0).to(tl.float32)
    second = tl.load(source + second_dims, mask=is_read, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + pairs, mask=is_pair, other=0.0).to(tl.float32)
    sine = tl.load(sines + pairs, mask=is_pair, other=0.0).to(tl.float32)
    if has_rest:
        rest_dims = 2 * NUM_PAIRS + tl.arange(0, REST)[None, :]
        is_rest = rest_dims < HEAD_DIM
        rest = tl.load(source + rest_dims, mask=is_head & is_rest, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if has_rest:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = normalize(first, scale, weight, first_dims, is_pair, dtype, ADDS_ONE)
        second = normalize(second, scale, weight, second_dims, is_pair, dtype, ADDS_ONE)
        if has_rest:
            rest = normalize(rest, scale, weight, rest_dims, is_rest, dtype, ADDS_ONE)
    turned_first = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    tl.store(target + first_dims, turned_first.to(dtype), mask=is_stored & is_pair)
    tl.store(target + second_dims, turned_second.to(dtype), mask=is_stored & is_pair)
    if has_rest:
        tl.store(target + rest_dims, rest.to(dtype), mask=is_stored & is_rest)


# Where these integers begin in a step's buffer of inputs must not decide which code is compiled.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def rotate_into_slots(
    query,
    projected,
    query_norm,
    key_norm,
    cos,
    sin,
    key_cache,
    value_cache,
    slot_mapping,
    eps,
    query_stride_token,
    query_stride_head,
    projected_stride,
    cos_stride,
    sin_stride,
    key_cache_stride_block,
    key_cache_stride_head,
    key_cache_stride_slot,
    value_cache_stride_block,
    value_cache_stride_head,
    value_cache_stride_slot,
    slot_mapping_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIR_STEP: tl.constexpr,
    PAIR_GAP: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    ADDS_ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (t, g): HEADS heads of token t. The first programs of a token have its queries, the
    others its keys and the values of the same heads; those of tokens without a slot store nothing.
    """
    wait_for_previous_grid(DEPENDENT)
    # 64 bits: caches have more than 2^31 elements.
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    row = projected + token * projected_stride
    cosines = cos + token * cos_stride
    sines = sin + token * sin_stride
    heads = group * HEADS + tl.arange(0, HEADS)[:, None]
    if group < query_groups:
        is_head = heads < NUM_HEADS
        turn_heads(
            query + token * query_stride_token + heads * query_stride_head,
            row + heads * HEAD_DIM,
            query_norm,
            cosines,
            sines,
            is_head,
            is_head,
            eps,
            HEAD_DIM,
            NUM_PAIRS,
            PAIR_STEP,
            PAIR_GAP,
            PAIRS,
            REST,
            ADDS_ONE,
        )
    else:
        kv_heads = heads - query_groups * HEADS
        is_kv_head = kv_heads < NUM_KV_HEADS
        slot = tl.load(slot_mapping + token * slot_mapping_stride)
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        # Tokens without a slot are read too, so that no read waits for the slot.
        is_stored = is_kv_head & (slot >= 0)
        keys = row + (NUM_HEADS + kv_heads) * HEAD_DIM
        dims = tl.arange(0, DIMS)[None, :]
        is_dim = dims < HEAD_DIM
        values = tl.load(keys + NUM_KV_HEADS * HEAD_DIM + dims, mask=is_kv_head & is_dim)
        key_slot = key_cache + block * key_cache_stride_block + offset * key_cache_stride_slot
        turn_heads(
            key_slot + kv_heads * key_cache_stride_head,
            keys,
            key_norm,
            cosines,
            sines,
            is_kv_head,
            is_stored,
            eps,
            HEAD_DIM,
            NUM_PAIRS,
            PAIR_STEP,
            PAIR_GAP,
            PAIRS,
            REST,
            ADDS_ONE,
        )
        value_slot = (
            value_cache + block * value_cache_stride_block + offset * value_cache_stride_slot
        )
        value_heads = value_slot + kv_heads * value_cache_stride_head
        tl.store(value_heads + dims, values, mask=is_stored & is_dim)
