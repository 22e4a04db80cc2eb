"""Timing the attention operator alone, over caches as large as a model's."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from triton_ops import paged_attention

_CACHE_BYTES = 2**30
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
class AttentionShape:
    """Rows of equal length, each at the end of equally many keys."""

    rows: int
    queries: int
    keys: int


class AttentionTimer:
    """Attention over random keys and values, a layer after the other, as a step of the model would find them.

    Args:
        config: the model's shape; windows are not applied.
        keys: of all rows together at most.
        dtype, device: of queries, keys and values.
    """

    def __init__(self, config: ModelConfig, *, keys: int, block_size: int, dtype: torch.dtype, device: str) -> None:
        self._config, self._block_size, self._dtype, self._device = config, block_size, dtype, torch.device(device)
        self._watch = Stopwatch(self._device)
        blocks = -(-keys // block_size)
        shape = (2, blocks, config.num_kv_heads, block_size, config.head_dim)
        one = torch.randn(shape, device=self._device).to(dtype)
        layers = max(2, min(config.num_layers, _CACHE_BYTES // one.nbytes))
        self._blocks = torch.randperm(blocks, dtype=torch.int32)
        self._layers: Iterator[Tensor] = cycle([one, *(one.clone() for _ in range(layers - 1))])

    def seconds(self, shape: AttentionShape) -> float:
        """Of one layer: the mean over as many calls as take a few milliseconds."""
        arguments = self._arguments(shape)
        with torch.inference_mode():
            calls, began = 0, self._watch.now()
            while calls < _MOST_CALLS:
                self._call(arguments)
                calls += 1
                passed = self._watch.now() - began
                if passed > _SAMPLE_SECONDS:
                    break
        return passed / calls

    def _call(self, arguments: tuple[Tensor, ...]) -> None:
        out, query, tables, starts, contexts = arguments
        key_cache, value_cache = next(self._layers).unbind()
        scale = self._config.head_dim**-0.5
        paged_attention(out, query, key_cache, value_cache, tables, starts, contexts, scale=scale, sliding_window=0)

    def _arguments(self, shape: AttentionShape) -> tuple[Tensor, ...]:
        heads, size, device = self._config.num_heads, self._config.head_dim, self._device
        tokens, each = shape.rows * shape.queries, -(-shape.keys // self._block_size)
        return (
            torch.empty(tokens, heads * size, dtype=self._dtype, device=device),
            torch.randn(tokens, heads, size, device=device).to(self._dtype),
            self._blocks[: shape.rows * each].view(shape.rows, each).to(device),
            torch.arange(0, tokens + 1, shape.queries, dtype=torch.int32, device=device),
            torch.full((shape.rows,), shape.keys, dtype=torch.int32, device=device),
        )
