"""A GPU's KV blocks on their way to the host pool or back, through pinned memory for full speed.

Two chunks of some blocks take turns: while the device fills or empties one on a stream of its own,
beside the computing, the calling thread copies the other between pinned memory and the pool
(Seesaw, section 5.2).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from triton_ops import gather_blocks, scatter_blocks

CHUNK_BYTES = 256 * 1024
"""Copied at a time, of one layer's keys or values: what was read is still in the processor's cache
when written."""

BlockArrays = Sequence[tuple[np.ndarray, np.ndarray]]
"""Keys and values of each layer, [num_blocks, kv heads]; an element is what one head keeps of a
block."""


def as_blocks(cache: Tensor) -> np.ndarray:
    """[num_blocks, kv heads, block_size, head_dim] of any dtype -> [num_blocks, kv heads] of bytes;
    the same memory.

    numpy copies such elements whole, in the thread that asks for it and without the interpreter's
    lock; torch would copy number by number, and start as many threads again as compute.
    """
    num_blocks, heads, block_size, head_dim = cache.shape
    size = block_size * head_dim * cache.dtype.itemsize
    plain = cache.detach().view(torch.uint8).numpy().reshape(num_blocks, heads, size)
    return plain.view(np.dtype((np.void, size)))[..., 0]


def block_arrays(caches: Iterable[tuple[Tensor, Tensor] | Tensor]) -> BlockArrays:
    """Arrays of each layer's keys and values: in pairs, or [layers, 2, num_blocks, kv heads,
    block_size, head_dim]."""
    return [(as_blocks(keys), as_blocks(values)) for keys, values in caches]


def copy_blocks_between(
    sources: BlockArrays,
    source_blocks: Sequence[int],
    targets: BlockArrays,
    target_blocks: Sequence[int],
) -> None:
    """Copy blocks to blocks, pairwise, in every layer; no target block may appear twice."""
    reads = np.array(source_blocks, np.intp)
    writes = np.array(target_blocks, np.intp)
    for layer_sources, layer_targets in zip(sources, targets, strict=True):
        for source, target in zip(layer_sources, layer_targets, strict=True):
            block_bytes = source.itemsize * source.shape[1]
            count = max(1, CHUNK_BYTES // block_bytes)
            for start in range(0, len(reads), count):
                chunk = slice(start, start + count)
                target[writes[chunk]] = source[reads[chunk]]


STAGING_BYTES = 8 * 2**20
"""Size of a chunk, on the device and again in pinned memory: enough for the full speed of the link
between them."""

Ready = Iterable[tuple[slice, "torch.cuda.Event | None"]]
"""Layers whose blocks may be read, in turn, each with what the device must have passed before that.
Taking the next one may wait."""


def staging_memory(block_bytes: int) -> int:
    """Bytes on the device of both directions' chunks, for blocks of `block_bytes`."""
    return 4 * max(1, STAGING_BYTES // block_bytes) * block_bytes


class _Chunk:
    """Room for some blocks on the device and in pinned memory: of all layers, or for more of them
    of fewer layers."""

    def __init__(
        self, num_blocks: int, block_shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_shape = block_shape
        size = num_blocks * block_shape.numel()
        self._device = torch.empty(size, dtype=dtype, device=device)
        self._pinned = torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")
        # An event behind the last copy between the two.
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def views(self, num_layers: int, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Views of both memories, [num_layers, 2, num_blocks, kv heads, block_size, head_dim], each
        in one piece."""
        _, two, *block = self._block_shape
        shape = torch.Size((num_layers, two, num_blocks, *block))
        return self._device[: shape.numel()].view(shape), self._pinned[: shape.numel()].view(shape)


class GpuStaging:
    """One direction's way of one layout's blocks; for one thread. The caches are one tensor per
    layer, [num_device_blocks, kv heads, block_size, head_dim]; `shape` is a block's, (layers, 2, kv
    heads, block_size, head_dim)."""

    def __init__(
        self,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_layers = shape[0]
        self._blocks_per_chunk = max(1, STAGING_BYTES // (shape.numel() * dtype.itemsize))
        self._key_caches, self._value_caches = list(key_caches), list(value_caches)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._chunks = [_Chunk(self._blocks_per_chunk, shape, dtype, device) for _ in range(2)]

    def out(
        self,
        device_blocks: Sequence[int],
        pool: BlockArrays,
        host_blocks: Sequence[int],
        ready: Ready,
    ) -> None:
        """Copy out: the device fills a chunk while this thread empties the one before into the
        pool."""
        filled: tuple[_Chunk, Sequence[int], BlockArrays] | None = None
        chunks = cycle(self._chunks)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            numbers = torch.tensor(device_blocks, dtype=torch.int64, device=self._device)
            for layers, after in ready:
                if after is not None:
                    self._stream.wait_event(after)
                keys, values = self._key_caches[layers], self._value_caches[layers]
                for places in self._parts(len(device_blocks), len(keys)):
                    chunk, targets = next(chunks), host_blocks[places]
                    staged, pinned = chunk.views(len(keys), len(targets))
                    gather_blocks(staged, keys, values, numbers[places])
                    pinned.copy_(staged, non_blocking=True)
                    chunk.copied.record(self._stream)
                    if filled is not None:
                        _empty(*filled)
                    filled = chunk, targets, pool[layers]
        if filled is not None:
            _empty(*filled)

    def into(
        self,
        device_blocks: Sequence[int],
        pool: BlockArrays,
        host_blocks: Sequence[int],
        after: "torch.cuda.Event | None",
    ) -> None:
        """Copy in: this thread fills a chunk from the pool while the device empties the one before
        into its caches. The device must have passed `after` before it writes."""
        chunks = cycle(self._chunks)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            numbers = torch.tensor(device_blocks, dtype=torch.int64, device=self._device)
            for places in self._parts(len(device_blocks), self._num_layers):
                chunk, sources = next(chunks), host_blocks[places]
                chunk.copied.synchronize()  # its last use is over
                staged, pinned = chunk.views(self._num_layers, len(sources))
                copy_blocks_between(pool, sources, block_arrays(pinned), range(len(sources)))
                staged.copy_(pinned, non_blocking=True)
                chunk.copied.record(self._stream)
                scatter_blocks(self._key_caches, self._value_caches, staged, numbers[places])
        self._stream.synchronize()

    def _parts(self, num_blocks: int, num_layers: int) -> Iterator[slice]:
        """Ranges of blocks that fit in a chunk, where each has `num_layers` layers."""
        count = self._blocks_per_chunk * self._num_layers // num_layers
        for start in range(0, num_blocks, count):
            yield slice(start, min(start + count, num_blocks))


def _empty(chunk: _Chunk, targets: Sequence[int], pool: BlockArrays) -> None:
    """Copy a chunk into these layers of the pool, as soon as the device has filled it."""
    chunk.copied.synchronize()
    _, pinned = chunk.views(len(pool), len(targets))
    copy_blocks_between(block_arrays(pinned), range(len(targets)), pool, targets)
