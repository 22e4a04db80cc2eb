"""Writing keys and values into the paged cache, and copying its blocks within it, out of it and
back."""

from collections.abc import Sequence

from torch import Tensor

from triton_ops.registration import OPERATORS

SKIPPED_SLOT = -1


@OPERATORS.define(writes=("key_cache", "value_cache"))
def cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store each token's key and value in its slot.

    key: [T, num_kv_heads, head_dim]; key_cache: [num_blocks, num_kv_heads, block_size, head_dim];
    value and value_cache are as wide, or their width is 0: latents have no values of their own;
    slot_mapping: int64 [T], block * block_size + offset, or -1 for a padding token that is not
    stored. No slot may appear twice.
    """
    stored = slot_mapping != SKIPPED_SLOT
    slots = slot_mapping[stored]
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[stored]
    value_cache[blocks, :, offsets] = value[stored]


@OPERATORS.define(writes=("key_cache", "value_cache"))
def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks: pairs is int64 [N, 2] of (source, destination). All sources are read
    before any is written.

    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim]; values may have a
    width of 0.
    """
    sources, destinations = pairs.unbind(1)
    key_cache[destinations] = key_cache[sources]
    value_cache[destinations] = value_cache[sources]


@OPERATORS.define(writes=("staged",))
def gather_blocks(
    staged: Tensor,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    blocks: Tensor,
    first_head: int = 0,
) -> None:
    """Copy blocks of one or several layers' caches, all heads or a range of them, into a staging
    buffer.

    staged: [num_layers, 2, N, num_heads, block_size, head_dim] of any strides, keys at index 0 of
    the second dimension and values at 1; key_caches, value_caches: the num_layers layers to move,
    each [num_blocks, num_kv_heads, block_size, head_dim]; blocks: int64 [N], the same in every
    layer. Head h of `staged` is the caches' head first_head + h.

    Raises:
        ValueError: if the shapes do not fit together.
    """
    check_staged(staged, key_caches, value_caches, blocks, first_head)
    heads = slice(first_head, first_head + staged.shape[3])
    for (staged_keys, staged_values), key_cache, value_cache in zip(
        staged, key_caches, value_caches, strict=True
    ):
        staged_keys.copy_(key_cache[blocks, heads])
        staged_values.copy_(value_cache[blocks, heads])


@OPERATORS.define(writes=("key_caches", "value_caches"))
def scatter_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    staged: Tensor,
    blocks: Tensor,
    first_head: int = 0,
) -> None:
    """The way back: copy what `gather_blocks` staged into blocks of the caches, which may be others
    than it came from.

    Shapes and errors as there; no block may appear twice. Other blocks and heads are left as they
    are.
    """
    check_staged(staged, key_caches, value_caches, blocks, first_head)
    heads = slice(first_head, first_head + staged.shape[3])
    for (staged_keys, staged_values), key_cache, value_cache in zip(
        staged, key_caches, value_caches, strict=True
    ):
        key_cache[blocks, heads] = staged_keys
        value_cache[blocks, heads] = staged_values


def check_staged(
    staged: Tensor,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    blocks: Tensor,
    first_head: int,
) -> None:
    """Raises ValueError unless a staging buffer has room for exactly these blocks and its heads are
    in the caches."""
    shapes = {cache.shape for cache in (*key_caches, *value_caches)}
    if len(shapes) != 1 or len(key_caches) != len(value_caches):
        raise ValueError(
            "every layer moved needs a cache of keys and one of values, all of one shape"
        )
    _, num_kv_heads, block_size, head_dim = shapes.pop()
    wanted = (len(key_caches), 2, blocks.shape[0], staged.shape[3], block_size, head_dim)
    if staged.shape != wanted:
        raise ValueError(
            f"the staging buffer must have the shape {wanted}, not {tuple(staged.shape)}"
        )
    if not 0 <= first_head <= num_kv_heads - staged.shape[3]:
        last_head = first_head + staged.shape[3] - 1
        raise ValueError(
            f"heads {first_head} to {last_head} were asked for; the caches have {num_kv_heads} "
            "heads"
        )
