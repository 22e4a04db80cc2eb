"""Attention over a paged cache: the bytes and operations it cannot do without, and batches to call it with.

Batches lie on shuffled blocks, and what must not be read can be poisoned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from triton_ops import paged_attention


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence of a batch: how many of its tokens are queries, and how many it has in the cache, those included."""

    queries: int
    context: int

    @property
    def pairs(self) -> int:
        """Queries times the keys each of them sees: the last query sees `context`, the one before it one fewer."""
        first_sees = self.context - self.queries + 1
        return self.queries * (first_sees + self.context) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionShape:
    """Attention over a paged cache: its rows and its heads."""

    rows: tuple[AttentionRow, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """Queries of all rows."""
        return sum(row.queries for row in self.rows)

    def num_bytes(self, bytes_per_number: int) -> int:
        """Keys and values of every row's context read once, queries read and results written once."""
        context = sum(row.context for row in self.rows)
        numbers = 2 * context * self.num_kv_heads + 2 * self.tokens * self.num_heads
        return numbers * self.head_dim * bytes_per_number

    @property
    def operations(self) -> int:
        """Two products of `head_dim` multiply-adds, of two operations each, for every head and pair."""
        return 4 * self.num_heads * self.head_dim * sum(row.pairs for row in self.rows)


def decode_rows(batch: int, context: int) -> tuple[AttentionRow, ...]:
    """One new token each of `batch` sequences."""
    return (AttentionRow(1, context),) * batch


def moved_bytes(tokens: int, num_kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """Keys and values of so many tokens, each read once and written once."""
    return 2 * 2 * tokens * num_kv_heads * head_dim * bytes_per_number


NO_SUCH_BLOCK = 10**6
"""What a block table holds behind its row's last block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of `paged_attention`, with its shapes."""

    out: Tensor
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    sliding_window: int

    def attend(self) -> Tensor:
        """Run the operator; fills and returns `out`."""
        paged_attention(*self.tensors, scale=self.query.shape[2] ** -0.5, sliding_window=self.sliding_window)
        return self.out

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The operator's tensors, in its order."""
        caches = self.key_cache, self.value_cache
        return self.out, self.query, *caches, self.block_tables, self.query_starts, self.context_lengths

    def moved(self, device: torch.device | str, dtype: torch.dtype) -> "AttentionCall":
        """A copy on another device; its numbers, not its indices, in another format."""
        tensors: dict[str, Any] = {
            field.name: value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


def make_batch(
    shape: PagedAttentionShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    sliding_window: int = 0,
    poisoned: bool = False,
) -> AttentionCall:
    """Random numbers of unit variance, drawn on the device; block tables as wide as the longest row needs.

    With `poisoned`, slots that no row uses, and the results before they are written, are NaN, and the tables name
    blocks that do not exist behind each row's last one: whatever is read or left out wrongly shows.
    """
    generator = torch.Generator(device).manual_seed(0)
    needed = [-(-row.context // block_size) for row in shape.rows]
    spare = 3 if poisoned else 0
    order = torch.randperm(sum(needed) + spare, generator=generator, device=device).int()
    tables = torch.full((len(needed), max(needed)), NO_SUCH_BLOCK if poisoned else 0, dtype=torch.int32, device=device)
    first = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[first : first + count]
        first += count
    cache_shape = (len(order), shape.num_kv_heads, block_size, shape.head_dim)
    caches = [torch.randn(cache_shape, generator=generator, device=device, dtype=dtype) for _ in range(2)]
    if poisoned:
        _poison(caches, [row.context for row in shape.rows], tables, needed, order[first:])
    query_shape = (shape.tokens, shape.num_heads, shape.head_dim)
    lengths = torch.tensor([0, *(row.queries for row in shape.rows)])
    return AttentionCall(
        out=torch.full((shape.tokens, shape.num_heads * shape.head_dim), math.nan, dtype=dtype, device=device),
        query=torch.randn(query_shape, generator=generator, device=device, dtype=dtype),
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        query_starts=lengths.cumsum(0).int().to(device),
        context_lengths=torch.tensor([row.context for row in shape.rows], dtype=torch.int32, device=device),
        sliding_window=sliding_window,
    )


def _poison(
    caches: Sequence[Tensor], contexts: Sequence[int], tables: Tensor, needed: Sequence[int], unused: Tensor
) -> None:
    block_size = caches[0].shape[2]
    for cache in caches:
        cache[unused.long()] = math.nan
        for row, (context, count) in enumerate(zip(contexts, needed, strict=True)):
            cache[tables[row, count - 1].long(), :, (context - 1) % block_size + 1 :] = math.nan


def contiguous(batch: AttentionCall, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values gathered, for rows of equal context: [rows, num_kv_heads, context, head_dim] each."""
    tables = batch.block_tables.long()
    key, value = (
        cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous()
        for cache in (batch.key_cache, batch.value_cache)
    )
    return key, value
