"""The host pool: complete KV blocks in memory that all workers of a machine share.

One file in memory holds a number of blocks with all layers and heads of the whole model. Each
worker sees a part of it, the layers and heads of its shard, whichever way the model is divided:
what one parallel layout wrote another can read, and nothing is ever sent from worker to worker
(Seesaw, section 5.2: the shared CPU memory holds the full KV).
"""

import errno
import mmap
import os
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.start.memory import available_memory, kv_bytes_per_block, memory_errors
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.shards import Shard
from nanoserve.scheduler.windows import most_blocks, most_tokens
from nanoserve.utils.sizes import format_size

HOST_SHARE = 0.25
"""Share of free memory for a pool whose size was not asked for: the rest is for the KV cache of
workers on the CPU, and for the page cache, where weights wait to be loaded again."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """One worker's part of the pool."""

    blocks: Tensor
    """[tensors, 2, num_blocks, kv heads, block_size, head_dim] of the worker's shard, keys at index
    0 of the second dimension and values at 1; a view of the pool."""
    writes: bool
    """Whether the worker fills it. Where several ranks hold the same heads, the first of them does
    so for all."""


class HostPool:
    """KV blocks of a whole model."""

    def __init__(self, blocks: Tensor, config: ModelConfig) -> None:
        # [tensors of a cache group, 2, num_blocks, num_kv_heads, block_size, head_dim]; keys and
        # values lie as in a cache of the whole model (HND).
        self.blocks = blocks
        self._config = config

    @classmethod
    def open(
        cls,
        path: Path,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        create: bool = False,
    ) -> Self:
        """The pool in a file, which another process of this machine has created with the same
        arguments.

        With `create`, make it in an empty file. Every byte is reserved now: no write into it can
        fail later. When others have opened it, the file may be removed: the pool goes with its last
        user. Raises RuntimeFailure if the pool, or the memory for it, is not there.
        """
        shape = _shape(config, num_blocks, block_size)
        descriptor, size = _open_file(path), prod(shape) * dtype.itemsize
        try:
            if create:
                _reserve(descriptor, size)
            elif os.fstat(descriptor).st_size != size:
                raise RuntimeFailure(
                    f"the host pool {path} has another size than this engine's; run one version "
                    "only"
                )
            memory = mmap.mmap(descriptor, size)
        except OSError as error:  # a limit on addresses, say
            problem = (
                f"a host pool of {format_size(size)} cannot be mapped: {error.strerror}; {_LOWER}"
            )
            raise RuntimeFailure(problem) from None
        finally:
            os.close(descriptor)  # the mapping stays
        return cls(torch.frombuffer(memory, dtype=dtype).view(shape), config)

    @classmethod
    def of_one_process(
        cls, config: ModelConfig, *, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> Self:
        """A pool in memory of this process alone; raises RuntimeFailure if the memory for it is not
        there."""
        shape = _shape(config, num_blocks, block_size)
        size = prod(shape) * dtype.itemsize
        _check_memory(size)
        with memory_errors(
            torch.device("cpu"), f"a host pool of {format_size(size)} does not fit", _LOWER
        ):
            return cls(torch.empty(shape, dtype=dtype), config)

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[2]

    def part(self, shard: Shard) -> HostPart:
        """The layers and key-value heads of a shard."""
        num_heads, tensors = (
            self._config.num_kv_heads,
            self._config.cache_groups.tensors(shard.layers),
        )
        heads = shard.kv_heads(num_heads)
        blocks = self.blocks[tensors.start : tensors.stop, :, :, heads.start : heads.stop]
        writes = True
        if shard.rank:
            before = replace(shard, rank=shard.rank - 1).kv_heads(num_heads)
            writes = heads != before  # the first of the ranks that share these heads writes them
        return HostPart(blocks, writes=writes)


def check_within_reach(path: Path) -> None:
    """Raise RuntimeFailure if the file of a pool cannot be opened here, before a model is loaded in
    vain."""
    os.close(_open_file(path))


def choose_host_blocks(model: ModelConfig, config: EngineConfig, reserved: int = 0) -> int:
    """How many blocks one engine's host pool gets: 0, unless asked for or needed by two layouts or
    the policy.

    ``--host-kv-memory`` is that of all engines of this machine together, in equal shares. Without
    it they get a share of what is free but for the `reserved` bytes, each no more than
    ``--max-num-seqs`` sequences of full length can use. Raises UsageError if more is asked for than
    is free, or the pool is too small to be of use.
    """
    if not config.uses_host_memory:
        return 0
    if model.attention.mla is not None:
        option = "--host-kv-memory"
        if config.attends_on_host:
            option = "--policy"
        elif config.decode_layout is not None:
            option = "--decode-parallel"
        raise UsageError(
            f"{option}: the KV cache of {model.family} is latents, which stay on the device; leave "
            "it out"
        )
    block_size, engines, asked = config.block_size, config.data_parallel, config.host_kv_memory
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    per_block, windows = kv_bytes_per_block(model, block_size, dtype), model.cache_groups.windows
    memory = max(0, available_memory("cpu") - reserved)
    most = config.max_model_len or model.max_position_embeddings
    if asked is None:
        size = int(memory * HOST_SHARE) // engines
        blocks = min(
            size // per_block, config.max_num_seqs * most_blocks(windows, most, block_size)
        )
        told = f"a host pool of {format_size(size)}, {HOST_SHARE:.0%} of what is free,"
    else:
        size = asked // engines
        blocks = size // per_block
        told = f"--host-kv-memory {format_size(asked)}"
        if engines > 1:
            told = f"{told} for {engines} engines"
        if size > memory:
            raise UsageError(
                f"{told} is more than the {format_size(memory)} of memory that is left for it; ask "
                "for less"
            )
    # With two layouts every sequence passes through a pool that was asked for.
    passes_through = asked is not None and config.decode_layout is not None
    holds_longest = config.max_model_len is not None or passes_through
    fewest_tokens, wanted = 1, f"blocks are of {block_size}"
    if holds_longest:
        fewest_tokens, wanted = most, f"one sequence may have {most}"
    needed = most_blocks(windows, fewest_tokens, block_size)
    if blocks < needed:
        tokens = most_tokens(windows, blocks, block_size, most)
        advice = f"set --host-kv-memory to {format_size(needed * per_block * engines)} at least"
        if holds_longest and tokens:
            advice = f"{advice}, or lower --max-model-len to {tokens}"
        raise UsageError(f"{told} holds {tokens} tokens of an engine, but {wanted}: {advice}")
    return blocks


_LOWER = "lower --host-kv-memory"


def _shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    width, _ = config.tensor_widths
    return config.cache_groups.num_tensors, 2, num_blocks, config.num_kv_heads, block_size, width


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        raise RuntimeFailure(
            f"cannot open the host pool {path}: {error.strerror}; all workers of an engine share "
            "it, so they must"
            " run on one machine, and in one container"
        ) from None


def _check_memory(size: int) -> None:
    """Raises RuntimeFailure if it is more than is free: the kernel would grant it, and kill some
    process later."""
    if size > (free := available_memory("cpu")):
        raise RuntimeFailure(
            f"a host pool of {format_size(size)} does not fit into the {format_size(free)} of "
            "memory that is free;"
            f" {_LOWER}"
        )


def _reserve(descriptor: int, size: int) -> None:
    """Give the file its size and all the memory for it, or raise RuntimeFailure.

    A file that merely has its size gets memory when it is written; where none is left, the writer
    dies of SIGBUS.
    """
    _check_memory(size)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise RuntimeFailure(f"cannot reserve a host pool: {error.strerror}") from None
        raise RuntimeFailure(
            f"a host pool of {format_size(size)} does not fit ({error.strerror}); {_LOWER}"
        ) from None
