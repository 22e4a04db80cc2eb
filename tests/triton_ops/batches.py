"""The product's poisoned batches for paged attention, as the tests of its implementations build
them."""

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
    return make_batch(
        rows,
        *sizes,
        block_size=block_size,
        dtype=dtype,
        poisoned=True,
        shared_blocks=shared,
        seed=seed,
    )


def inputs(batch: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of paged_attention behind `out`."""
    _, *others = batch.tensors
    query, key_cache, value_cache, tables, starts, lengths = others
    return query, key_cache, value_cache, tables, starts, lengths


def poisoned_out(batch: AttentionCall) -> Tensor:
    return torch.full_like(batch.out, torch.nan)


def narrowed(batch: AttentionCall, value_dim: int, *, latent: bool) -> AttentionCall:
    """Copy a batch with values of another width: of their own, or the first columns of the keys."""
    values = (
        batch.key_cache[..., :value_dim]
        if latent
        else batch.value_cache[..., :value_dim].contiguous()
    )
    return replace(
        batch,
        value_cache=values,
        out=batch.out.new_full((len(batch.query), batch.query.shape[1] * value_dim), torch.nan),
    )


def visible(position: int, span: int, begin: int, context: int, window: int) -> range:
    """The positions that a query sees: from the window of the first position of its span to the
    end of the span. One span begins at `begin`, and the others whole spans before and behind it."""
    start = begin + (position - begin) // span * span
    first = max(0, start - (window - 1)) if window else 0
    return range(first, min(start + span, context))


def reference(
    batch: AttentionCall,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    spans: Tensor | None = None,
) -> Tensor:
    """Attention by its definition, in float64, one query after another: [tokens, num_heads *
    value_dim]."""
    _, num_kv_heads, block_size, _ = batch.key_cache.shape
    # each head of keys serves a group of queries
    query = batch.query.double().unflatten(1, (num_kv_heads, -1))
    group_sinks = None if sinks is None else sinks.double().view(num_kv_heads, -1)
    results = query.new_empty(*query.shape[:3], batch.value_cache.shape[3])
    for row, context in enumerate(batch.context_lengths.tolist()):
        start, end = batch.query_starts[row : row + 2].tolist()
        span, begin = [1, 0] if spans is None else spans[row].tolist()
        # Blocks behind the window of the row's first query may be gone.
        first_read = visible(context - (end - start), span, begin, context, window).start
        positions = torch.arange(first_read, context)
        places = (
            batch.block_tables[row, positions // block_size].long(),
            slice(None),
            positions % block_size,
        )
        keys, values = (
            cache[places].double().transpose(0, 1) for cache in (batch.key_cache, batch.value_cache)
        )
        for token in range(start, end):
            sight = visible(context - (end - token), span, begin, context, window)
            seen = slice(sight.start - first_read, sight.stop - first_read)
            scores = torch.einsum("hgd,hkd->hgk", query[token], keys[:, seen]).mul(scale)
            weights = (soft_cap * (scores / soft_cap).tanh() if soft_cap else scores).exp()
            total = weights.sum(-1) + (0.0 if group_sinks is None else group_sinks.exp())
            results[token] = torch.einsum(
                "hgk,hkd->hgd", weights / total[..., None], values[:, seen]
            )
    return results.flatten(1)


def padded(batch: AttentionCall, tokens: int, rows: int) -> AttentionCall:
    """Make the batch a mixed step's of a captured graph: behind its own stand so many tokens that
    belong to no row, whose queries are NaN, and so many rows without tokens, whose contexts are
    those of some earlier step and whose blocks do not exist."""
    queries, tables = batch.query, batch.block_tables
    ends = batch.query_starts[-1:].expand(rows)
    contexts = 1 + 37 * torch.arange(rows, dtype=torch.int32)
    return replace(
        batch,
        out=batch.out.new_full((len(queries) + tokens, batch.out.shape[1]), torch.nan),
        query=torch.cat([queries, queries.new_full((tokens, *queries.shape[1:]), torch.nan)]),
        block_tables=torch.cat([tables, tables.new_full((rows, tables.shape[1]), 10**6)]),
        query_starts=torch.cat([batch.query_starts, ends]),
        context_lengths=torch.cat([batch.context_lengths, contexts]),
    )
