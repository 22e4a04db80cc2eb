"""Launches the programs that write the paged cache and move its blocks.

Nothing here waits for the GPU, and every grid follows from shapes alone: all of it may be captured
in a CUDA graph.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from triton_ops.cache import check_staged
from triton_ops.gpu.cache_constants import NUM_WARPS, move_constants, write_constants
from triton_ops.gpu.kernels.cache import move_blocks, write_slots


def cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`triton_ops.cache_write`, for any strides of all tensors: a program per token and group of
    heads.

    Raises:
        ValueError: if the shapes do not fit together; the programs would read and write what is not
            theirs.
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    stored = (slot_mapping.shape[0], num_kv_heads, head_dim)
    has_values = value_cache.shape[-1] > 0
    if key.shape != stored or (
        has_values and (value.shape != stored or value_cache.shape != key_cache.shape)
    ):
        raise ValueError(
            f"keys {tuple(key.shape)} and values {tuple(value.shape)} cannot be written to "
            f"{stored[0]} slots of caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    constants = write_constants(num_kv_heads, block_size, head_dim, has_values=has_values)
    with torch.cuda.device_of(key_cache):  # type: ignore[no-untyped-call]
        write_slots[(slot_mapping.shape[0], triton.cdiv(num_kv_heads, constants["HEADS"]))](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            *key.stride(),
            *value.stride(),
            *key_cache.stride(),
            *value_cache.stride(),
            *slot_mapping.stride(),
            **constants,
            num_warps=NUM_WARPS,
        )


def copy_blocks(key_cache: Tensor, value_cache: Tensor, pairs: Tensor) -> None:
    """`triton_ops.copy_blocks`, through a staging buffer.

    A block may be one pair's destination and another's source. Programs of one launch run in no
    order, those of two launches on a stream do: the first launch reads every source, the second
    writes every destination. Copies are rare (the first write into a shared block), so moving their
    bytes twice costs less than knowing that it need not be. Where there are no values, keys take
    their part too.
    """
    value_cache = value_cache if value_cache.shape[-1] else key_cache
    sources, destinations = pairs.unbind(1)
    staged = key_cache.new_empty((1, 2, pairs.shape[0], *key_cache.shape[1:]))
    gather_blocks(staged, [key_cache], [value_cache], sources)
    scatter_blocks([key_cache], [value_cache], staged, destinations)


def gather_blocks(
    staged: Tensor,
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    blocks: Tensor,
    first_head: int = 0,
) -> None:
    """`triton_ops.gather_blocks`, a launch per layer."""
    _move(key_caches, value_caches, staged, blocks, first_head, into_cache=False)


def scatter_blocks(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    staged: Tensor,
    blocks: Tensor,
    first_head: int = 0,
) -> None:
    """`triton_ops.scatter_blocks`, a launch per layer."""
    _move(key_caches, value_caches, staged, blocks, first_head, into_cache=True)


def _move(
    key_caches: Sequence[Tensor],
    value_caches: Sequence[Tensor],
    staged: Tensor,
    blocks: Tensor,
    first_head: int,
    *,
    into_cache: bool,
) -> None:
    check_staged(staged, key_caches, value_caches, blocks, first_head)
    _, _, num_blocks, num_heads, block_size, head_dim = staged.shape
    constants = move_constants(block_size, head_dim, into_cache=into_cache)
    with torch.cuda.device_of(key_caches[0]):  # type: ignore[no-untyped-call]
        for staged_layer, key_cache, value_cache in zip(
            staged.unbind(), key_caches, value_caches, strict=True
        ):
            moved_keys = key_cache.narrow(1, first_head, num_heads)
            moved_values = value_cache.narrow(1, first_head, num_heads)
            move_blocks[(num_blocks, num_heads)](
                moved_keys,
                moved_values,
                staged_layer,
                blocks,
                *moved_keys.stride(),
                *moved_values.stride(),
                *staged_layer.stride(),
                *blocks.stride(),
                **constants,
                num_warps=NUM_WARPS,
            )
