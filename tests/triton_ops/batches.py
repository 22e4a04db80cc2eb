"""The product's poisoned batches for paged attention, as the tests of its implementations build them."""

from dataclasses import replace

import torch
from torch import Tensor

from nanoserve.lab.benchmarks.gpu.attention import AttentionCall, AttentionRow, make_batch


def build(
    rows: list[AttentionRow],
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    seed: int,
    shared: int = 0,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionCall:
    """Rows on shuffled blocks; the first `shared` full blocks of all rows are the same ones."""
    sizes = (num_heads, num_kv_heads, head_dim)
    return make_batch(rows, *sizes, block_size=block_size, dtype=dtype, poisoned=True, shared_blocks=shared, seed=seed)


def inputs(batch: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of paged_attention behind `out`."""
    _, *others = batch.tensors
    query, key_cache, value_cache, tables, starts, lengths = others
    return query, key_cache, value_cache, tables, starts, lengths


def poisoned_out(batch: AttentionCall) -> Tensor:
    return torch.full_like(batch.out, torch.nan)


def narrowed(batch: AttentionCall, value_dim: int, *, latent: bool) -> AttentionCall:
    """The same with values of another width: of their own, or the first columns of the keys."""
    values = batch.key_cache[..., :value_dim] if latent else batch.value_cache[..., :value_dim].contiguous()
    return replace(
        batch,
        value_cache=values,
        out=batch.out.new_full((len(batch.query), batch.query.shape[1] * value_dim), torch.nan),
    )


def reference(
    batch: AttentionCall, scale: float, window: int, soft_cap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Attention by its definition, in float64, one query after another: [tokens, num_heads * value_dim]."""
    query, block_size = batch.query.double(), batch.key_cache.shape[2]
    group = query.shape[1] // batch.key_cache.shape[1]
    results = query.new_empty(*query.shape[:2], batch.value_cache.shape[3])
    for row, context in enumerate(batch.context_lengths.tolist()):
        start, end = batch.query_starts[row : row + 2].tolist()
        for token in range(start, end):
            position = context - (end - token)
            first = max(0, position - window + 1) if window else 0
            seen = torch.arange(first, position + 1)
            places = batch.block_tables[row, seen // block_size].long(), slice(None), seen % block_size
            keys, values = (
                cache[places].double().repeat_interleave(group, dim=1) for cache in (batch.key_cache, batch.value_cache)
            )
            scores = torch.einsum("hd,khd->hk", query[token], keys).mul(scale)
            weights = (soft_cap * (scores / soft_cap).tanh() if soft_cap else scores).exp()
            total = weights.sum(-1) + (0.0 if sinks is None else sinks.double().exp())
            results[token] = torch.einsum("hk,khd->hd", weights / total[:, None], values)
    return results.flatten(1)
