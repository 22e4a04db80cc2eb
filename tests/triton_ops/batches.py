"""Batches for paged attention, with poison wherever nothing belongs, and their results by definition."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One sequence: how many of its tokens are queries of this step, and how many it has in all."""

    queries: int
    context: int


@dataclass(frozen=True)
class Batch:
    """A filled cache with its metadata, and each row's keys and values as plain tensors for the reference."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def poisoned_out(self) -> Tensor:
        return torch.full_like(self.query.flatten(1), math.nan)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What paged_attention takes behind `out`."""
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.query_starts,
            self.context_lengths,
        )


def build(
    rows: list[Row],
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    seed: int,
    shared: int = 0,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """Rows on shuffled blocks; the first `shared` blocks of every row long enough are one and the same."""
    generator = torch.Generator().manual_seed(seed)
    order = random.Random(seed)
    needed = [-(-row.context // block_size) for row in rows]
    free = list(range(sum(needed) + 4))
    order.shuffle(free)
    common = [free.pop() for _ in range(shared)]
    shape = (len(free) + shared + sum(needed), num_kv_heads, block_size, head_dim)
    key_cache, value_cache = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
    # Behind a row's last block its table may hold anything: here, a block that does not exist.
    tables = torch.full((len(rows), max(needed) + 1), 10**6, dtype=torch.int32)
    keys, values = [], []
    longest = max(row.context for row in rows)
    prefix = torch.randn(2, longest, num_kv_heads, head_dim, generator=generator).to(dtype)
    for index, row in enumerate(rows):
        blocks = [
            common[position] if position < shared and (position + 1) * block_size <= row.context else free.pop()
            for position in range(needed[index])
        ]
        tables[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        own = torch.randn(2, row.context, num_kv_heads, head_dim, generator=generator).to(dtype)
        common_tokens = sum(block in common for block in blocks) * block_size
        own[:, :common_tokens] = prefix[:, :common_tokens]
        keys.append(own[0])
        values.append(own[1])
        for position in range(row.context):
            block, offset = blocks[position // block_size], position % block_size
            key_cache[block, :, offset] = own[0, position]
            value_cache[block, :, offset] = own[1, position]
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.queries)
    return Batch(
        query=torch.randn(starts[-1], num_heads, head_dim, generator=generator).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables,
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lengths=torch.tensor([row.context for row in rows], dtype=torch.int32),
        keys=keys,
        values=values,
    )


def reference(batch: Batch, scale: float, window: int) -> Tensor:
    """Attention by its definition, one query and one head at a time, in float64."""
    num_heads, num_kv_heads = batch.query.shape[1], batch.key_cache.shape[1]
    results = torch.empty(batch.query.shape, dtype=torch.float64)
    for row, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        start, end = batch.query_starts[row : row + 2].tolist()
        for token in range(start, end):
            position = key.shape[0] - (end - token)
            first = max(0, position - window + 1) if window else 0
            for head in range(num_heads):
                kv_head = head * num_kv_heads // num_heads
                scores = key[first : position + 1, kv_head].double() @ batch.query[token, head].double() * scale
                weights = torch.exp(scores - scores.max())
                results[token, head] = weights @ value[first : position + 1, kv_head].double() / weights.sum()
    return results.flatten(1)
