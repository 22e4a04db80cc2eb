"""Timing decode and prompt attention alone, on the device and by the threads that attend in host memory."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionBatch
from nanoserve.runtime.host.host_attention import HostTask
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.moves.host_pool import HostPart
from nanoserve.runtime.profiling.rounds import seconds_of
from triton_ops import paged_attention

_SAMPLE_SECONDS = 2e-3
_MOST_CALLS = 50


class Stopwatch:
    """Wall time, with the device's queue empty at both ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Rows of equal length, each at the end of the same number of keys."""

    rows: int
    queries: int
    keys: int

    def blocks(self, block_size: int) -> int:
        """Blocks that the keys fill."""
        return self.rows * -(-self.keys // block_size)


class KvRegions:
    """Random keys and values of one layer, in which consecutive calls read different blocks.

    In a step each call reads another layer's cache, so a call finds its data in the processor's caches only if the data
    of all layers fits there. So there is one region for each layer of the model, or as many as there is room for.

    Args:
        config: the model's shape.
        largest: blocks that a call reads at most.
        most_bytes: limit for keys and values; the largest call always has room.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        largest: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        most_bytes: int,
    ) -> None:
        self._block_size, self._layers = block_size, config.num_layers
        block = torch.randn(2, 1, config.num_kv_heads, block_size, config.head_dim, device=device).to(dtype)
        num_blocks = max(largest, min(config.num_layers * largest, most_bytes // block.nbytes))
        # [2, num_blocks, num_kv_heads, block_size, head_dim], keys first.
        self.blocks = block.expand(-1, num_blocks, -1, -1, -1).contiguous()
        self._order = torch.randperm(num_blocks, dtype=torch.int32)

    def tables(self, shape: AttentionCall) -> list[Tensor]:
        """Block tables, int32 [rows, width] each, of one region after the other."""
        each = shape.blocks(self._block_size)
        regions = min(self._layers, len(self._order) // each)
        return [table.view(shape.rows, -1) for table in self._order[: regions * each].chunk(regions)]


class AttentionTimer:
    """Attention on the device. Sliding windows are not applied.

    Args:
        config: the model's shape.
        regions: on the device.
    """

    def __init__(self, config: ModelConfig, regions: KvRegions) -> None:
        self._config, self._regions = config, regions
        self._keys, self._values = regions.blocks.unbind()
        self._watch = Stopwatch(regions.blocks.device)

    def seconds(self, shape: AttentionCall) -> float:
        """Seconds of one layer: the mean over a few milliseconds of calls."""
        calls = self._calls(shape)
        with torch.inference_mode():
            count, began = 0, self._watch.now()
            while count < _MOST_CALLS:
                next(calls)()
                count += 1
                passed = self._watch.now() - began
                if passed > _SAMPLE_SECONDS:
                    break
        return passed / count

    def _calls(self, shape: AttentionCall) -> Iterator[Callable[[], None]]:
        config, device, dtype = self._config, self._keys.device, self._keys.dtype
        tokens, size = shape.rows * shape.queries, config.head_dim
        out = torch.empty(tokens, config.num_heads * size, dtype=dtype, device=device)
        query = torch.randn(tokens, config.num_heads, size, device=device).to(dtype)
        starts = torch.arange(0, tokens + 1, shape.queries, dtype=torch.int32, device=device)
        contexts = torch.full((shape.rows,), shape.keys, dtype=torch.int32, device=device)

        def attend(tables: Tensor) -> None:
            keys, values = self._keys, self._values
            paged_attention(out, query, keys, values, tables, starts, contexts, scale=size**-0.5, sliding_window=0)

        tables = [table.to(device) for table in self._regions.tables(shape)]
        return cycle([lambda table=table: attend(table) for table in tables])


class HostAttentionTimer:
    """Attention in host memory as in the engine: handed over to a thread with cores of its own.

    The device computes meanwhile, as in every step with host sequences. Where the CPU is the device too, both need the
    same memory's bandwidth.

    Args:
        config: the model's shape; windows are not applied.
        regions: in host memory.
        processor: attends.
        device: where queries come from and results go.
        keep_busy: a piece of the device's work, a few milliseconds at most.
    """

    def __init__(
        self,
        config: ModelConfig,
        regions: KvRegions,
        processor: HostProcessor,
        *,
        device: torch.device,
        keep_busy: Callable[[], object],
    ) -> None:
        self._config, self._regions, self._device, self._keep_busy = config, regions, device, keep_busy
        part = HostPart(regions.blocks[None], writes=True)
        self._host = processor.start(replace(config, sliding_windows=()), part, device)

    def seconds(self, rows: int, keys: int) -> float:
        """Seconds of one layer for `rows` sequences of `keys` keys each, from handing over to the result: the mean over
        a few milliseconds of calls."""
        calls = cycle(self._regions.tables(AttentionCall(rows, 1, keys)))
        query, key, value = self._entering(rows)
        found: list[float] = []
        with torch.inference_mode():
            while len(found) < _MOST_CALLS and sum(found) < _SAMPLE_SECONDS:
                task = self._host.attend(0, query, key, value, self._rows(next(calls), keys))
                self._keep_busy()
                self._await(task)
                found += [work.seconds for work in self._host.take_work()]
        return sum(found) / len(found)

    def device_seconds(self, rows: int, keys: int) -> float:
        """Seconds of a piece of the device's work while the host attends for `rows` sequences of `keys` keys."""
        at = self._rows(self._regions.tables(AttentionCall(rows, 1, keys))[0], keys)
        entering, found = self._entering(rows), list[float]()
        with torch.inference_mode():
            task = self._host.attend(0, *entering, at)
            while len(found) < _MOST_CALLS and sum(found) < _SAMPLE_SECONDS:
                following = self._host.attend(0, *entering, at)  # otherwise the host might finish first
                found.append(seconds_of(self._keep_busy))
                self._await(task)
                task = following
            self._await(task)
            self._host.take_work()
        return sum(found) / len(found)

    def close(self) -> None:
        """End its thread."""
        self._host.close()

    def _await(self, task: HostTask) -> None:
        while not task.ready:
            self._keep_busy()

    def _entering(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        config, dtype = self._config, self._regions.blocks.dtype
        heads = config.num_heads + 2 * config.num_kv_heads
        numbers = torch.randn(rows, heads, config.head_dim, device=self._device).to(dtype)
        return (
            numbers[:, : config.num_heads],
            numbers[:, config.num_heads : heads - config.num_kv_heads],
            numbers[:, heads - config.num_kv_heads :],
        )

    def _rows(self, tables: Tensor, keys: int) -> AttentionBatch:
        """The new key and value are the last ones."""
        starts = torch.arange(len(tables) + 1, dtype=torch.int32)
        contexts = torch.full((len(tables),), keys, dtype=torch.int32)
        size = self._regions.blocks.shape[3]
        slots = tables[:, (keys - 1) // size].long() * size + (keys - 1) % size
        return AttentionBatch(tables, starts, contexts, slots)
