"""Attention over a paged cache: its least bytes and operations, batches to call it with, and when
results agree.

The benchmarks, the checks on a GPU and the tests of the operator share these batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triton_ops import paged_attention


class AttentionRow(NamedTuple):
    """One sequence of a batch: the number of its queries, and of its tokens in the cache, the
    queries' own included."""

    queries: int
    context: int

    @property
    def pairs(self) -> int:
        """Queries times the keys each of them sees: the last query sees `context`, the one before
        it one fewer."""
        return self.queries * (2 * self.context - self.queries + 1) // 2


def decode_rows(batch: int, context: int) -> tuple[AttentionRow, ...]:
    """One new token each of `batch` sequences."""
    return (AttentionRow(1, context),) * batch


NO_SUCH_BLOCK = 10**6  # the entries of a block table behind its row's last block


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of `paged_attention`, with its shapes, and the rows that they describe."""

    rows: tuple[AttentionRow, ...]
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
        caches = self.key_cache, self.value_cache
        return (
            self.out,
            self.query,
            *caches,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
        )

    @property
    def is_ragged(self) -> bool:
        return len(set(self.rows)) > 1

    @property
    def is_decode(self) -> bool:
        """Whether every row has a single query."""
        return len(self.query) == len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Keys and values of every row's context read once, queries read and results written
        once."""
        per_token = self.key_cache[0, :, 0].nbytes + self.value_cache[0, :, 0].nbytes
        return (
            per_token * sum(row.context for row in self.rows) + self.query.nbytes + self.out.nbytes
        )

    @property
    def operations(self) -> int:
        """Two products of `head_dim` multiply-adds, of two operations each, for every head and
        pair."""
        return 4 * self.query[0].numel() * sum(row.pairs for row in self.rows)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values of rows of equal context in one piece: [rows, num_kv_heads, context,
        head_dim] each."""
        tables, context = self.block_tables.long(), self.rows[0].context
        key, value = (
            cache[tables].transpose(1, 2).flatten(2, 3)[:, :, :context].contiguous()
            for cache in (self.key_cache, self.value_cache)
        )
        return key, value


def make_batch(
    rows: Sequence[AttentionRow],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    sliding_window: int = 0,
    poisoned: bool = False,
    shared_blocks: int = 0,
    seed: int = 0,
) -> AttentionCall:
    """Random numbers of unit variance, drawn on the device; `out` is NaN. Block tables are as wide
    as the longest row needs. With `poisoned`, unused slots are NaN too, and tables name blocks that
    do not exist behind each row's last one, so a wrong read shows. `shared_blocks` leading blocks
    are the same ones in all rows that fill them."""
    generator = torch.Generator(device).manual_seed(seed)
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    integers = partial(torch.tensor, dtype=torch.int32, device=device)
    needed = [-(-row.context // block_size) for row in rows]
    num_blocks, width, behind = sum(needed) + shared_blocks, max(needed), 0
    if poisoned:
        num_blocks, width, behind = num_blocks + 3, width + 1, NO_SUCH_BLOCK
    order = torch.randperm(num_blocks, generator=generator, device=device).int()
    caches = [random(num_blocks, num_kv_heads, block_size, head_dim) for _ in range(2)]
    tables = order.new_full((len(rows), width), behind)
    is_used = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=device)
    first = shared_blocks
    for table, count, row in zip(tables, needed, rows, strict=True):
        common = min(shared_blocks, row.context // block_size)
        table[:common] = order[:common]
        table[common:count] = order[first + common : first + count]
        first += count
        is_used[table[: count - 1].long()] = True
        is_used[table[count - 1].long(), : (row.context - 1) % block_size + 1] = True
    if poisoned:
        for cache in caches:
            cache.transpose(1, 2)[~is_used] = math.nan
    starts = list(accumulate((row.queries for row in rows), initial=0))
    return AttentionCall(
        rows=tuple(rows),
        out=torch.full((starts[-1], num_heads * head_dim), math.nan, dtype=dtype, device=device),
        query=random(starts[-1], num_heads, head_dim),
        key_cache=caches[0],
        value_cache=caches[1],
        block_tables=tables,
        query_starts=integers(starts),
        context_lengths=integers([row.context for row in rows]),
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
    )


TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""Tolerances for `compared`: probabilities and results are rounded to 8, 11 or 24 bits on their
way."""


def compared(what: str, found: Tensor, expected: Tensor, tolerance: float) -> dict[str, Any]:
    """The fields of a check: NaN agrees with NaN, and nothing else with it. A number may differ by
    `tolerance` times the sum of its own size and the root mean square of its row (the last
    dimension): results over many keys are small, and leaving out one of a thousand shall show."""
    here, there = found.detach().cpu().double(), expected.detach().cpu().double()
    unwanted = int((here.isfinite() != there.isfinite()).sum())
    difference, size = (here - there).abs().nan_to_num(0.0), there.abs().nan_to_num(0.0)
    allowed = tolerance * (size + size.square().mean(-1, keepdim=True).sqrt())
    share = None
    if tolerance:
        share = float((difference / allowed).nan_to_num(0.0).max())
    return {
        "check": what,
        "largest_difference": float(difference.max()),
        "tolerance": tolerance,
        "of_tolerance": share,
        "unwanted_nans": unwanted,
        "ok": unwanted == 0 and bool((difference <= allowed).all()),
    }
