"""Writes into the paged cache, and moves of its blocks: nothing is computed, so the least time is
the bytes read and written over the bandwidth of memory.

Pointers bear the names and shapes of the operators' arguments (`triton_ops.cache`); strides count
elements, in the order of the dimensions. Heads whose size is no power of two are padded to one with
masks.
"""

import triton
import triton.language as tl


# Where these integers begin in a step's buffer of inputs must not decide which code is compiled.
@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def write_slots(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride_token,
    key_stride_head,
    key_stride_dim,
    value_stride_token,
    value_stride_head,
    value_stride_dim,
    key_cache_stride_block,
    key_cache_stride_head,
    key_cache_stride_slot,
    key_cache_stride_dim,
    value_cache_stride_block,
    value_cache_stride_head,
    value_cache_stride_slot,
    value_cache_stride_dim,
    slot_mapping_stride,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    """Program (t, g): key and value of token t, heads g * HEADS and after; tokens without a slot
    are skipped."""
    # 64 bits: caches have more than 2^31 elements, and any dimension may be the outermost in
    # memory.
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token * slot_mapping_stride)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        dims = tl.arange(0, DIMS)[None, :]
        used = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)

        key_tile = key + token * key_stride_token + heads * key_stride_head + dims * key_stride_dim
        value_tile = (
            value + token * value_stride_token + heads * value_stride_head + dims * value_stride_dim
        )
        keys = tl.load(key_tile, mask=used)
        values = tl.load(value_tile, mask=used) if HAS_VALUES else keys

        key_cache_slot = key_cache + block * key_cache_stride_block + offset * key_cache_stride_slot
        value_cache_slot = (
            value_cache + block * value_cache_stride_block + offset * value_cache_stride_slot
        )
        value_cache_slot += heads * value_cache_stride_head + dims * value_cache_stride_dim
        tl.store(
            key_cache_slot + heads * key_cache_stride_head + dims * key_cache_stride_dim,
            keys,
            mask=used,
        )
        if HAS_VALUES:
            tl.store(value_cache_slot, values, mask=used)


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def move_blocks(
    key_cache,
    value_cache,
    staged,
    blocks,
    key_cache_stride_block,
    key_cache_stride_head,
    key_cache_stride_slot,
    key_cache_stride_dim,
    value_cache_stride_block,
    value_cache_stride_head,
    value_cache_stride_slot,
    value_cache_stride_dim,
    staged_stride_kind,
    staged_stride_block,
    staged_stride_head,
    staged_stride_slot,
    staged_stride_dim,
    blocks_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    DIMS: tl.constexpr,
    INTO_CACHE: tl.constexpr,
):
    """Program (n, h): keys and values of head h between block blocks[n] of the cache and the n-th
    staged block.

    SLOTS of them at a time."""
    index, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + index * blocks_stride).to(tl.int64)
    key_cache_block = key_cache + block * key_cache_stride_block + head * key_cache_stride_head
    value_cache_block = (
        value_cache + block * value_cache_stride_block + head * value_cache_stride_head
    )
    staged_block = staged + index * staged_stride_block + head * staged_stride_head
    for first in range(0, BLOCK_SIZE, SLOTS):
        slots, dims = first + tl.arange(0, SLOTS)[:, None], tl.arange(0, DIMS)[None, :]
        used = (slots < BLOCK_SIZE) & (dims < HEAD_DIM)
        key_cache_tile = (
            key_cache_block + slots * key_cache_stride_slot + dims * key_cache_stride_dim
        )
        value_cache_tile = (
            value_cache_block + slots * value_cache_stride_slot + dims * value_cache_stride_dim
        )
        staged_keys = staged_block + slots * staged_stride_slot + dims * staged_stride_dim
        staged_values = staged_keys + staged_stride_kind
        if INTO_CACHE:
            keys, values = tl.load(staged_keys, mask=used), tl.load(staged_values, mask=used)
            tl.store(key_cache_tile, keys, mask=used)
            tl.store(value_cache_tile, values, mask=used)
        else:
            keys, values = tl.load(key_cache_tile, mask=used), tl.load(value_cache_tile, mask=used)
            tl.store(staged_keys, keys, mask=used)
            tl.store(staged_values, values, mask=used)
