"""Writing keys and values into the paged cache, and copying its blocks."""

from torch import Tensor

from triton_ops.registration import OPERATORS

SKIPPED_SLOT = -1


@OPERATORS.define(writes=("key_cache", "value_cache"))
def cache_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot.

    key, value: [T, num_kv_heads, head_dim]; key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim];
    slot_mapping: int64 [T], block * block_size + offset, or -1 for a padding token that is not stored. No slot may
    appear twice.
    """
    stored = slot_mapping != SKIPPED_SLOT
    slots = slot_mapping[stored]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[stored]
    value_cache[blocks, :, offsets] = value[stored]


@OPERATORS.define(writes=("key_cache", "value_cache"))
def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks: pairs is int64 [N, 2] of (source, destination). All sources are read before any is written.

    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim].
    """
    sources, destinations = pairs.unbind(1)
    key_cache[destinations] = key_cache[sources]
    value_cache[destinations] = value_cache[sources]
