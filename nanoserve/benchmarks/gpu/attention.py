"""Attention over a paged cache: its least bytes and operations, batches to call it with, and its definition.

The benchmarks, the checks on a GPU and the tests of the operator share these batches. They lie on shuffled blocks, and
what must not be read can be poisoned.
"""

import math
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
    """Bytes moved for the keys and values of ``tokens`` tokens, each read once and written once."""
    return 2 * 2 * tokens * num_kv_heads * head_dim * bytes_per_number


NO_SUCH_BLOCK = 10**6
"""The entries of a block table behind its row's last block."""


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
    scale: float
    sliding_window: int

    def attend(self) -> Tensor:
        """Run the operator; fills and returns `out`."""
        paged_attention(*self.tensors, scale=self.scale, sliding_window=self.sliding_window)
        return self.out

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The operator's tensors, in its order."""
        caches = self.key_cache, self.value_cache
        return self.out, self.query, *caches, self.block_tables, self.query_starts, self.context_lengths

    def moved(self, device: torch.device | str) -> "AttentionCall":
        """A copy on another device."""
        tensors: dict[str, Any] = {
            field.name: value.to(device, copy=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)

    def by_definition(self) -> Tensor:
        """The result in float64, one query after another: [tokens, num_heads * head_dim]. On the CPU only."""
        query, block_size = self.query.double(), self.key_cache.shape[2]
        group = query.shape[1] // self.key_cache.shape[1]
        results = torch.empty_like(query)
        for row, context in enumerate(self.context_lengths.tolist()):
            start, end = self.query_starts[row : row + 2].tolist()
            for token in range(start, end):
                position = context - (end - token)
                first = max(0, position - self.sliding_window + 1) if self.sliding_window else 0
                seen = torch.arange(first, position + 1)
                places = self.block_tables[row, seen // block_size].long(), slice(None), seen % block_size
                keys, values = (
                    cache[places].double().repeat_interleave(group, dim=1)
                    for cache in (self.key_cache, self.value_cache)
                )
                weights = torch.einsum("hd,khd->hk", query[token], keys).mul(self.scale).softmax(-1)
                results[token] = torch.einsum("hk,khd->hd", weights, values)
        return results.flatten(1)

    def gathered(self, context: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows of equal context in one piece: [rows, num_kv_heads, context, head_dim] each."""
        tables = self.block_tables.long()
        key, value = (
            cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous()
            for cache in (self.key_cache, self.value_cache)
        )
        return key, value


def make_batch(
    shape: PagedAttentionShape,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scale: float | None = None,
    sliding_window: int = 0,
    poisoned: bool = False,
    shared_blocks: int = 0,
    seed: int = 0,
) -> AttentionCall:
    """Random numbers of unit variance, drawn on the device; block tables as wide as the longest row needs.

    With `poisoned`, slots that no row uses are NaN, and the tables name blocks that do not exist behind each row's last
    one: a wrong read shows. Results are NaN before they are written.

    Args:
        scale: of the products of queries and keys; by default head_dim ** -0.5.
        shared_blocks: number of leading blocks that rows share, as far as they fill them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    needed = [-(-row.context // block_size) for row in shape.rows]
    spare = 3 if poisoned else 0
    order = torch.randperm(sum(needed) + shared_blocks + spare, generator=generator, device=device).int()
    width = max(needed) + (1 if poisoned else 0)
    tables = torch.full((len(needed), width), NO_SUCH_BLOCK if poisoned else 0, dtype=torch.int32, device=device)
    cache_shape = (len(order), shape.num_kv_heads, block_size, shape.head_dim)
    caches = [torch.randn(cache_shape, generator=generator, device=device, dtype=dtype) for _ in range(2)]
    is_used = torch.zeros(len(order), block_size, dtype=torch.bool, device=device)
    first = shared_blocks
    for row, count in enumerate(needed):
        context, common = shape.rows[row].context, min(shared_blocks, shape.rows[row].context // block_size)
        tables[row, :common] = order[:common]
        tables[row, common:count] = order[first + common : first + count]
        first += count
        is_used[tables[row, : count - 1].long()] = True
        is_used[tables[row, count - 1].long(), : (context - 1) % block_size + 1] = True
    for cache in caches if poisoned else ():
        cache.transpose(1, 2)[~is_used] = math.nan
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
        scale=shape.head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
    )


TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""As `compared` reads them: probabilities and results are rounded to 8, 11 or 24 bits on their way."""


def compared(what: str, found: Tensor, expected: Tensor, tolerance: float) -> dict[str, Any]:
    """The fields of a check: NaN agrees with NaN, and nothing else with it.

    A number may differ by `tolerance` times the sum of its own size and the root mean square of its row (the last
    dimension): results over many keys are small, and leaving out one of a thousand shall show.
    """
    here, there = found.detach().cpu().double(), expected.detach().cpu().double()
    unwanted = int((here.isfinite() != there.isfinite()).sum())
    difference, size = (here - there).abs().nan_to_num(0.0), there.abs().nan_to_num(0.0)
    allowed = tolerance * (size + size.square().mean(-1, keepdim=True).sqrt())
    share = float((difference / allowed).nan_to_num(0.0).max()) if tolerance else None
    return {
        "check": what,
        "largest_difference": float(difference.max()),
        "tolerance": tolerance,
        "of_tolerance": share,
        "unwanted_nans": unwanted,
        "ok": unwanted == 0 and bool((difference <= allowed).all()),
    }
