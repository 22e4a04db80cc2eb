"""The product's poisoned batches for paged attention, as the tests of its implementations build them."""

from dataclasses import replace

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.attention import AttentionCall, AttentionRow, PagedAttentionShape, make_batch


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
    shape = PagedAttentionShape(rows=tuple(rows), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return make_batch(shape, block_size=block_size, dtype=dtype, poisoned=True, shared_blocks=shared, seed=seed)


def inputs(batch: AttentionCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of paged_attention behind `out`."""
    _, *others = batch.tensors
    query, key_cache, value_cache, tables, starts, lengths = others
    return query, key_cache, value_cache, tables, starts, lengths


def poisoned_out(batch: AttentionCall) -> Tensor:
    return torch.full_like(batch.out, torch.nan)


def reference(batch: AttentionCall, scale: float, window: int) -> Tensor:
    """Attention by its definition, in float64."""
    return replace(batch, scale=scale, sliding_window=window).by_definition()
