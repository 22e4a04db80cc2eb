"""KV blocks of the host's memory as numpy sees them: pieces of plain bytes, copied from place to place."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 256 * 1024
"""Copied at a time, of one layer's keys or values: what was read is still in the processor's cache when it is
written."""

BlockArrays = Sequence[tuple[np.ndarray, np.ndarray]]
"""Keys and values of each layer, [num_blocks, kv heads]; an element is what one head keeps of a block."""


def as_blocks(cache: Tensor) -> np.ndarray:
    """[num_blocks, kv heads, block_size, head_dim] of any dtype -> [num_blocks, kv heads] of bytes; the same memory.

    numpy copies such elements whole, in the thread that asks for it and without the interpreter's lock; torch would
    copy number by number, and start as many threads again as compute.
    """
    num_blocks, heads, block_size, head_dim = cache.shape
    size = block_size * head_dim * cache.dtype.itemsize
    plain = cache.detach().view(torch.uint8).numpy().reshape(num_blocks, heads, size)
    return plain.view(np.dtype((np.void, size)))[..., 0]


def block_arrays(caches: Iterable[tuple[Tensor, Tensor] | Tensor]) -> BlockArrays:
    """Of each layer's keys and values, given in pairs or as [layers, 2, num_blocks, kv heads, block_size, head_dim]."""
    return [(as_blocks(keys), as_blocks(values)) for keys, values in caches]


def copy_blocks_between(
    sources: BlockArrays, source_blocks: Sequence[int], targets: BlockArrays, target_blocks: Sequence[int]
) -> None:
    """Copy blocks to blocks, pairwise, in every layer; no target block may appear twice."""
    reads, writes = np.array(source_blocks, np.intp), np.array(target_blocks, np.intp)
    for layer_sources, layer_targets in zip(sources, targets, strict=True):
        for source, target in zip(layer_sources, layer_targets, strict=True):
            count = max(1, CHUNK_BYTES // (source.itemsize * source.shape[1]))
            for start in range(0, len(reads), count):
                target[writes[start : start + count]] = source[reads[start : start + count]]
