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
        """query [T, num_heads, head_dim], key, value [T, num_kv_heads, head_dim] -> [T, num_heads * head_dim].

        Query and key are already rotated to their positions.
        """
        ...


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


@dataclass(slots=True)  # not frozen: within a compiled layer torch 2.11 finds no fields in one that is
class PagedAttention:
    """Attention of one step over the paged cache: writes the new keys and values, then attends over the whole context.

    Shapes as in `triton_ops.cache_write` and `triton_ops.paged_attention`; the caches are one tensor per layer, by the
    layer's index.
    """

    config: ModelConfig
    key_caches: Sequence[Tensor]
    value_caches: Sequence[Tensor]
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    slot_mapping: Tensor

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache_write(key, value, self.key_caches[layer], self.value_caches[layer], self.slot_mapping)
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        paged_attention(
            out,
            query,
            self.key_caches[layer],
            self.value_caches[layer],
            self.block_tables,
            self.query_starts,
            self.context_lengths,
            scale=self.config.head_dim**-0.5,
            sliding_window=self.config.sliding_window(layer),
        )
        return out
