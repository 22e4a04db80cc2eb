"""The attention functions a Decoder is given: dense over whole sequences, or over a paged cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.config import ModelConfig
from triton_ops import cache_write, paged_attention


class AttentionFunction(Protocol):
    """What stands between the two halves of a layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, num_heads, head_dim], key, value [T, num_kv_heads, head_dim] -> [T, num_heads * head_dim]. Query
        and key are already rotated to their positions."""


class DenseCausalAttention:
    """Causal attention over `batch` sequences of equal `length`, flattened to batch * length tokens.

    For training and as the plain reference: keeps no cache, differentiable, torch.compile sees through it.
    """

    def __init__(self, config: ModelConfig, batch: int, length: int) -> None:
        self.config = config
        self.batch = batch
        self.length = length

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        window = self.config.sliding_window(layer)
        slides = 0 < window < self.length
        attended = functional.scaled_dot_product_attention(
            self._sequences(query),
            self._sequences(key),
            self._sequences(value),
            attn_mask=self._window_mask(window, query.device) if slides else None,
            is_causal=not slides,
            enable_gqa=self.config.group_size > 1,
        )
        return attended.transpose(1, 2).reshape(self.batch * self.length, -1)

    def _sequences(self, heads: Tensor) -> Tensor:
        """[batch * length, H, D] -> [batch, H, length, D]"""
        return heads.view(self.batch, self.length, heads.shape[1], heads.shape[2]).transpose(1, 2)

    def _window_mask(self, window: int, device: torch.device) -> Tensor:
        position = torch.arange(self.length, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < window)


# Not frozen, neither of these two: within a compiled layer torch 2.11 finds no fields in a frozen dataclass.
@dataclass(slots=True)
class AttentionBatch:
    """Where R rows with T new tokens have their context in a paged cache; see `triton_ops.paged_attention`."""

    block_tables: Tensor
    """int32 [R, most blocks of a row]."""
    query_starts: Tensor
    """int32 [R + 1], where the new tokens of each row begin and end."""
    context_lengths: Tensor
    """int32 [R], tokens of each row in the cache once the new ones are written."""
    slot_mapping: Tensor
    """int64 [T], the slots that the new tokens are written to."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All fields, in order."""
        return self.block_tables, self.query_starts, self.context_lengths, self.slot_mapping

    def pick(self, rows: Tensor) -> "AttentionBatch":
        """Some rows, int64 [n], of a batch whose rows have one new token each."""
        starts = self.query_starts[: len(rows) + 1]
        return AttentionBatch(self.block_tables[rows], starts, self.context_lengths[rows], self.slot_mapping[rows])


@dataclass(slots=True)
class PagedAttention:
    """Attention of one step over the paged cache: writes the new keys and values, then attends over the whole context.
    The caches are one tensor per layer, by the layer's index: [num_blocks, num_kv_heads, block_size, head_dim]."""

    config: ModelConfig
    key_caches: Sequence[Tensor]
    value_caches: Sequence[Tensor]
    batch: AttentionBatch

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key_cache, value_cache, batch = self.key_caches[layer], self.value_caches[layer], self.batch
        cache_write(key, value, key_cache, value_cache, batch.slot_mapping)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        paged_attention(
            out,
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.query_starts,
            batch.context_lengths,
            scale=self.config.head_dim**-0.5,
            sliding_window=self.config.sliding_window(layer),
        )
        return out
