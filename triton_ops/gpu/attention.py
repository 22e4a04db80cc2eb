"""Paged attention on a GPU: which programs run, how many of them, and where their results go.

Nothing here waits for the GPU: what is launched follows from shapes alone, and the programs look up the rest. So a
captured graph stays right for any rows of the same shapes.
"""

import torch
from torch import Tensor

from triton_ops.gpu.configurations import (
    REDUCTION_WARPS,
    AttentionConfiguration,
    DecodeConfiguration,
    PrefillConfiguration,
    ProgramShape,
    UnsupportedByGpu,
    attention_configuration,
    decode_constants,
    num_splits,
    prefill_constants,
    reduction_constants,
)
from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.attention import add_up_splits, attend_longer_rows, attend_single_tokens

LOG2_E = 1.4426950408889634
"""The programs compute powers of two: exp(x) = 2 ** (x * log2(e))."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def paged_attention(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    sliding_window: int,
) -> None:
    """As `triton_ops.paged_attention`; a row with nothing in the cache gets zeros. Raises UnsupportedByGpu."""
    gpu = gpu_of(query.device)
    _check(out, query, key_cache, value_cache, scale)
    attend(
        attention_configuration(gpu.generation, query.element_size(), _program_shape(query, key_cache)),
        gpu.multiprocessors,
        (out, query, key_cache, value_cache, block_tables, query_starts, context_lengths),
        scale=scale,
        sliding_window=sliding_window,
    )


def attend(
    configuration: AttentionConfiguration,
    multiprocessors: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    scale: float,
    sliding_window: int,
) -> None:
    """The same with a given configuration, to compare one with another. `tensors` are paged_attention's, in order.

    As many tokens as rows means that every row has one.
    """
    _, query, _, _, _, query_starts, _ = tensors
    num_tokens, num_rows = query.shape[0], query_starts.shape[0] - 1
    launch = _Launch(tensors, scale * LOG2_E, sliding_window)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        if num_tokens != num_rows:
            launch.longer_rows(configuration.prefill)
        if num_tokens == num_rows or num_rows > 1:
            launch.single_tokens(configuration.decode, multiprocessors)


class _Launch:
    """The launches of one call."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
        scale: float,
        sliding_window: int,
    ) -> None:
        self.out, self.query, self.key_cache, self.value_cache, self.block_tables, self.query_starts, _ = tensors
        self.context_lengths = tensors[-1]
        self.scale = scale
        self.sliding_window = sliding_window
        self.num_tokens, self.num_heads, _ = self.query.shape
        self.num_kv_heads = self.key_cache.shape[1]
        self.num_rows = self.query_starts.shape[0] - 1
        self.shape = _program_shape(self.query, self.key_cache)
        self.strides = (
            self.out.stride(0),
            *self.query.stride()[:2],
            *self.key_cache.stride()[:3],
            self.block_tables.stride(0),
        )

    def longer_rows(self, configuration: PrefillConfiguration) -> None:
        constants = prefill_constants(configuration, self.shape, slides=self.sliding_window > 0)
        queries_per_tile = constants["TILE_ROWS"] // self.shape.group
        tiles = self.num_tokens // queries_per_tile + self.num_rows
        attend_longer_rows[(tiles * self.num_kv_heads,)](
            self.out,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            self.num_rows,
            self.num_kv_heads,
            self.scale,
            self.sliding_window,
            *self.strides,
            **constants,
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
        )

    def single_tokens(self, configuration: DecodeConfiguration, multiprocessors: int) -> None:
        splits = num_splits(
            configuration,
            multiprocessors=multiprocessors,
            num_rows=self.num_rows,
            num_kv_heads=self.num_kv_heads,
            most_keys=self.block_tables.shape[1] * self.shape.block_size,
        )
        results = weights = self.out  # not read where there is one split
        if splits > 1:
            sizes = (self.num_rows, self.num_heads, splits)
            results = self.out.new_empty((*sizes, self.shape.head_dim), dtype=torch.float32)
            weights = self.out.new_empty(sizes, dtype=torch.float32)
        attend_single_tokens[(self.num_kv_heads, splits, self.num_rows)](
            self.out,
            results,
            weights,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            self.scale,
            self.sliding_window,
            *self.strides,
            **decode_constants(configuration, self.shape, slides=self.sliding_window > 0, splits=splits > 1),
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
        )
        if splits > 1:
            add_up_splits[(self.num_heads, self.num_rows)](
                self.out,
                results,
                weights,
                self.query_starts,
                splits,
                self.out.stride(0),
                **reduction_constants(self.shape.head_dim, splits),
                num_warps=REDUCTION_WARPS,
            )


def _program_shape(query: Tensor, key_cache: Tensor) -> ProgramShape:
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    return ProgramShape(head_dim, block_size, query.shape[1] // num_kv_heads)


def _check(out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> None:
    """Raises UnsupportedByGpu for what the programs would read wrongly."""
    dtypes = {tensor.dtype for tensor in (out, query, key_cache, value_cache)}
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        found = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedByGpu(f"attention on a GPU takes one of bfloat16, float16 and float32 for all, not {found}")
    if any(tensor.stride(-1) != 1 for tensor in (out, query, key_cache, value_cache)):
        raise UnsupportedByGpu("attention on a GPU takes tensors whose last dimension is contiguous")
    if key_cache.stride() != value_cache.stride():
        raise UnsupportedByGpu("attention on a GPU takes keys and values that are laid out alike")
    if not scale > 0:
        raise UnsupportedByGpu(f"attention on a GPU takes a scale above zero, not {scale}")
