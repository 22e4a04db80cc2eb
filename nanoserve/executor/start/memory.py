"""How much memory there is, and how much of it becomes KV cache."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.scheduler.windows import empty_blocks, most_blocks, most_tokens
from nanoserve.utils.sizes import available_host_memory, format_size

# the cache's default share of free memory: the machine's owner is working on it too
CPU_SHARE = 0.25
CUDA_SHARE = 0.95
"""The cache's share of what a GPU has free beside steps: torch's allocator cannot use the last of
it in one piece."""

# mallopt's parameters in glibc
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Have the C library keep what is freed in this process, up to 1 GiB in one piece, for what is
    allocated next. By default it returns each large tensor of a step to the system, which clears
    the pages anew for the next layer."""
    with suppress(OSError, AttributeError):  # other C libraries have no such setting
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 25)  # the most that older versions take
        library.mallopt(_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def return_freed_memory() -> None:
    """Return to the system what `keep_freed_memory` has kept."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


_SLOTS_PER_SEQUENCE = 4
"""Slots for each sequence that may run: one that it works in, and snapshots."""
FEWEST_SLOTS = 2
"""Slots with which one sequence runs: it may move from one to another."""


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of a cache group's layers and all heads for `block_size`
    tokens."""
    return config.cache_groups.block_numbers * block_size * dtype.itemsize


def available_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated on the device; for the CPU within what its control group
    allows."""
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # held by torch
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    return available_host_memory()


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Memory of the KV cache that is for recurrent states: at most half of it."""

    taken: int = 0
    most: int = 0
    """Bytes that they would take if there were more memory."""

    def with_blocks(self, needed: int) -> int:
        """Memory that leaves what is needed for blocks."""
        return needed + min(needed, self.most)


NO_STATES = StateBytes()


def choose_num_blocks(
    per_block: int,
    free: int,
    longest: int,
    config: EngineConfig,
    windows: tuple[int, ...] = (0,),
    states: StateBytes = NO_STATES,
) -> int:
    """How many blocks of `per_block` bytes the KV cache gets out of `free` bytes; `longest` is the
    model's own limit in tokens, `windows` are those of its cache groups. Of ``--kv-cache-memory``
    they get what `states` leave.

    Without ``--kv-cache-memory`` it is a share of what is free, but no more than ``--max-num-seqs``
    requests of full length can use. Without ``--max-model-len``, such a cache may be smaller than
    the longest request: the caller lowers the limit to `most_tokens`. Raises UsageError if one
    request of full length does not fit, or more is asked for than is free.
    """
    length = config.max_model_len or longest
    per_request = most_blocks(windows, length, config.block_size)
    if config.kv_cache_memory is not None:
        return _explicit(
            config.kv_cache_memory,
            free,
            per_block,
            per_request,
            length,
            config.block_size,
            windows,
            states,
        )
    share = CUDA_SHARE
    if config.device == "cpu":
        share = CPU_SHARE
    affordable = int(free * share) // per_block
    if config.max_model_len is not None:
        # asked for by name: more than the usual share, if it is there
        affordable = max(affordable, per_request)
    if affordable < 1 or affordable * per_block > free:
        needed = format_size(per_request * per_block)
        raise UsageError(
            f"one request of {length} tokens needs {needed} of KV cache, but only "
            f"{format_size(free)} of memory"
            " is free; lower --max-model-len or free some memory"
        )
    most = most_blocks(windows, length, config.block_size, config.max_num_batched_tokens)
    return min(affordable, most * config.max_num_seqs)


def _explicit(
    asked: int,
    free: int,
    per_block: int,
    per_request: int,
    length: int,
    block_size: int,
    windows: tuple[int, ...],
    states: StateBytes,
) -> int:
    if asked > free:
        raise UsageError(
            f"--kv-cache-memory {format_size(asked)} is more than the {format_size(free)} of "
            "memory that is free;"
            f" ask for less"
        )
    blocks = (asked - states.taken) // per_block
    if blocks < per_request:
        needed = per_request * per_block
        tokens = most_tokens(windows, blocks, block_size, length)
        shorter = ""
        if tokens:
            shorter = f" or lower --max-model-len to {tokens}"
        raise UsageError(
            f"--kv-cache-memory {format_size(asked)} holds {tokens} tokens, but one request may "
            "have"
            f" {length}; raise it to {format_size(states.with_blocks(needed))}{shorter}"
        )
    return blocks


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The blocks of a KV cache, and the slots for recurrent states beside them."""

    num_blocks: int
    state_slots: int = 0


def choose_cache_size(
    per_block: int,
    per_slot: int,
    free: int,
    longest: int,
    config: EngineConfig,
    windows: tuple[int, ...] = (0,),
) -> CacheSize:
    """Divide the memory of the KV cache between blocks, as `choose_num_blocks` does and raises, and
    slots of `per_slot` bytes for recurrent states, 0 in models without.

    States get half of it at most, all of it where blocks hold nothing, and no more than
    _SLOTS_PER_SEQUENCE for each of ``--max-num-seqs``. Raises UsageError if they do not suffice for
    one sequence.
    """
    if per_slot == 0:
        return CacheSize(choose_num_blocks(per_block, free, longest, config, windows))
    share = CUDA_SHARE
    if config.device == "cpu":
        share = CPU_SHARE
    if config.kv_cache_memory is None:
        memory = int(free * share)
    else:
        memory = config.kv_cache_memory
    most_slots = _SLOTS_PER_SEQUENCE * config.max_num_seqs
    slots = min(most_slots, memory // per_slot)
    told = format_size(memory)
    if per_block:
        slots = min(most_slots, memory // 2 // per_slot)
        told = f"half of {told}"
    if slots < FEWEST_SLOTS:
        raise UsageError(
            f"{told} of KV cache does not hold the recurrent states of a "
            f"sequence, {FEWEST_SLOTS} times {format_size(per_slot)}; raise --kv-cache-memory"
        )
    if per_block == 0:
        blocks = empty_blocks(config.max_model_len or longest, config.block_size)
        return CacheSize(blocks, slots)
    states = StateBytes(slots * per_slot, most_slots * per_slot)
    left = free
    if config.kv_cache_memory is None:
        left = max(0, free - int(states.taken / share))
    return CacheSize(choose_num_blocks(per_block, left, longest, config, windows, states), slots)


@contextmanager
def memory_errors(device: torch.device, problem: str, advice: str) -> Iterator[None]:
    """Turn torch's many ways of saying "out of memory" into a RuntimeFailure of one line. It says
    the problem, as in "a step of 7 tokens does not fit", and what to change, as in "lower
    --max-num-batched-tokens"."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        free = format_size(available_memory(device))
        raise RuntimeFailure(
            f"out of memory on {device}: {problem} into {free} free; {advice}"
        ) from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    # On the CPU torch raises a plain RuntimeError from its allocator, as CUDA's libraries and
    # Triton do.
    told = (
        "DefaultCPUAllocator",
        "Cannot allocate memory",  # for a file to be mapped to
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
    )
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return any(words in message for words in told)
