"""Paged attention on a GPU: which programs run, how many of them, and where their results go.

Nothing here waits for the GPU: what is launched follows from shapes alone, and the programs look up
the rest. So a captured graph stays right for any rows of the same shapes.
"""

from functools import cache

import torch
from torch import Tensor

from triton_ops.gpu.configurations import (
    KEYS_PER_PROGRAM,
    AttentionConfiguration,
    DecodeConfiguration,
    PrefillConfiguration,
    ProgramShape,
    UnsupportedByGpu,
    attention_configuration,
    busy_programs,
    decode_constants,
    helpers_of_groups,
    most_shared,
    most_splits,
    prefill_constants,
    program_shape,
    programs_per_row,
)
from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.attention import prefill_attention
from triton_ops.gpu.kernels.decode_attention import decode_attention

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
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
) -> None:
    """Compute `triton_ops.paged_attention`; a row with nothing in the cache gets zeros. Raises
    UnsupportedByGpu."""
    gpu = gpu_of(query.device)
    _check(out, query, key_cache, value_cache, scale)
    attend(
        attention_configuration(
            gpu.generation, query.element_size(), _program_shape(query, value_cache)
        ),
        gpu.multiprocessors,
        (out, query, key_cache, value_cache, block_tables, query_starts, context_lengths),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        spans=spans,
    )


def attend(
    configuration: AttentionConfiguration,
    multiprocessors: int,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    scale: float,
    sliding_window: int,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
) -> None:
    """Compute it with a given configuration, to compare configurations. `tensors` are
    paged_attention's, in order.

    As many tokens as rows means that every row has one.
    """
    _, query, _, _, _, query_starts, _ = tensors
    num_tokens, num_rows = query.shape[0], query_starts.shape[0] - 1
    launch = _Launch(tensors, scale, sliding_window, soft_cap, sinks, spans)
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
        soft_cap: float,
        sinks: Tensor | None,
        spans: Tensor | None,
    ) -> None:
        (
            self.out,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_starts,
            _,
        ) = tensors
        self.context_lengths = tensors[-1]
        self.num_tokens, self.num_heads, _ = self.query.shape
        self.num_rows = self.query_starts.shape[0] - 1
        self.shape = _program_shape(self.query, self.value_cache)
        self.num_groups = self.num_heads // self.shape.group
        self.features = {
            "slides": sliding_window > 0,
            "capped": soft_cap > 0,
            "has_sinks": sinks is not None,
        }
        self.sinks = self.query_starts if sinks is None else sinks  # not read where there are none
        self.spans = spans
        self.sliding_window = sliding_window
        self.numbers = (scale * LOG2_E, 0.0, sliding_window)
        if soft_cap > 0:
            self.numbers = (2 * scale * LOG2_E / soft_cap, soft_cap * LOG2_E, sliding_window)
        self.strides = (
            self.out.stride(0),
            *self.query.stride()[:2],
            *self.key_cache.stride()[:3],
            self.block_tables.stride(0),
        )

    def longer_rows(self, configuration: PrefillConfiguration) -> None:
        constants = prefill_constants(configuration, self.shape, **self.features)
        queries_per_tile = constants["TILE_ROWS"] // self.shape.group
        tiles = self.num_tokens // queries_per_tile + self.num_rows
        prefill_attention[(tiles * self.num_groups,)](
            self.out,
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            self.sinks,
            self.spans,
            self.num_rows,
            self.num_groups,
            *self.numbers,
            *self.strides,
            **constants,
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
        )

    def single_tokens(self, configuration: DecodeConfiguration, multiprocessors: int) -> None:
        # a single query is the last of its row, so that a span only moves its window
        spans = self.spans if self.features["slides"] else None
        busy = busy_programs(configuration, multiprocessors)
        sizes = {
            "busy": busy,
            "num_rows": self.num_rows,
            "num_groups": self.num_groups,
            "most_keys": self.most_keys(),
        }
        programs, helpers = programs_per_row(configuration, **sizes), helpers_of_groups(**sizes)
        splits = most_splits(busy, self.num_groups)
        # all rows have several programs, or each of those that do has a helper at least
        shared_rows = self.num_rows if programs > 1 else helpers
        decode_attention[((helpers + self.num_rows) * self.num_groups, programs)](
            self.out,
            *self.room_for_splits(shared_rows, splits),
            arrival_counters(self.out.device, most_shared(busy, self.num_groups)),
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            self.sinks,
            spans,
            self.num_rows,
            self.num_groups,
            helpers,
            KEYS_PER_PROGRAM,
            splits,
            *self.numbers,
            *self.strides,
            **decode_constants(configuration, self.shape, **self.features),
            **gpu_of(self.out.device).dependent_launch,
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
        )

    def most_keys(self) -> int:
        """Count the keys that a single token sees at most."""
        in_table = self.block_tables.shape[1] * self.shape.block_size
        if self.features["slides"] and self.spans is None:
            return min(in_table, self.sliding_window + self.shape.block_size - 1)
        return in_table

    def room_for_splits(self, rows: int, splits: int) -> tuple[Tensor, Tensor]:
        """Allocate the results of the splits of so many rows that have several programs."""
        sizes = (rows * self.num_groups, splits, self.shape.group)
        return (
            self.out.new_empty((*sizes, self.shape.head_dim), dtype=torch.float32),
            self.out.new_empty((*sizes, 2), dtype=torch.float32),
        )


@cache
def arrival_counters(device: torch.device, number: int) -> Tensor:
    """Return a device's counters of programs that have stored their splits, one for each row and
    group of heads that may have several programs.

    They are zero whenever no decode attention runs: the last program to count resets its counter.
    So they are made once, by the step that runs before the first graph is captured. All graphs and
    eager steps share them, because a device's steps run one after another.
    """
    return torch.zeros(number, dtype=torch.int32, device=device)


def _program_shape(query: Tensor, value_cache: Tensor) -> ProgramShape:
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    _, num_heads, head_dim = query.shape
    return program_shape(
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=block_size,
        heads_per_kv_head=num_heads // num_kv_heads,
    )


def _check(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float
) -> None:
    """Raises UnsupportedByGpu for what the programs would read wrongly."""
    dtypes = {tensor.dtype for tensor in (out, query, key_cache, value_cache)}
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        found = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedByGpu(
            f"attention on a GPU takes one of bfloat16, float16 and float32 for all, not {found}"
        )
    if any(tensor.stride(-1) != 1 for tensor in (out, query, key_cache, value_cache)):
        raise UnsupportedByGpu(
            "attention on a GPU takes tensors whose last dimension is contiguous"
        )
    if key_cache.stride() != value_cache.stride():
        raise UnsupportedByGpu("attention on a GPU takes keys and values that are laid out alike")
    if (
        value_cache.shape[-1] != key_cache.shape[-1]
        and value_cache.data_ptr() != key_cache.data_ptr()
    ):
        raise UnsupportedByGpu(
            "attention on a GPU takes values of another width only as the keys' first columns"
        )
    if not scale > 0:
        raise UnsupportedByGpu(f"attention on a GPU takes a scale above zero, not {scale}")
