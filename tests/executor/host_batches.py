"""Host sequences with one new token each, whose key and value are not in the pool yet, and their
attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow as Row
from nanoserve.models.attention import AttentionBatch
from tests.executor.small_model import small_config
from tests.triton_ops.batches import build, reference

LAYERS = 3
"""At most: a test may give one batch's pool to each."""


@dataclass(frozen=True)
class HostBatch:
    """One layer's pool and rows.

    Attributes:
        written: keys and values as the pool must hold them when the new ones are in it; poison
            where nothing belongs.
        expected: [n, num_heads * head_dim], float64.
    """

    config: ModelConfig
    query: Tensor
    key: Tensor
    value: Tensor
    rows: AttentionBatch
    keys: Tensor
    values: Tensor
    written: tuple[Tensor, Tensor]
    expected: Tensor


def host_batch(
    contexts: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> HostBatch:
    """Queries, keys and values are parts of one tensor, as a layer's fused projection gives
    them."""
    config = replace(
        small_config(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=LayerDifferences(sliding_windows=(window,) * LAYERS),
    )
    batch = build(
        [Row(1, context) for context in contexts],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dtype=dtype,
        seed=seed,
    )
    expected = reference(batch, head_dim**-0.5, window)
    written = batch.key_cache.clone(), batch.value_cache.clone()
    last = torch.tensor(contexts) - 1
    blocks, offsets = (
        batch.block_tables[range(len(contexts)), last // block_size].long(),
        last % block_size,
    )
    slots = blocks * block_size + offsets
    new_keys, new_values = (cache[blocks, :, offsets] for cache in written)
    for cache in (batch.key_cache, batch.value_cache):
        cache[blocks, :, offsets] = math.nan
    fused = torch.cat((batch.query, new_keys, new_values), dim=1)
    query, key, value = fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return HostBatch(
        config=config,
        query=query,
        key=key,
        value=value,
        rows=AttentionBatch(batch.block_tables, batch.query_starts, batch.context_lengths, slots),
        keys=batch.key_cache,
        values=batch.value_cache,
        written=written,
        expected=expected,
    )
