"""The attention functions a Decoder is given: dense over whole sequences, or over a paged cache."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.config import ModelConfig


class AttentionFunction(Protocol):
    """What stands between the two halves of a layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim] -> [T, num_heads * head_dim].

        Positions are already rotated in.
        """
        ...


class DenseCausalAttention:
    """Causal attention over `batch` sequences of equal `length`, flattened to batch * length tokens; keeps no cache.

    For training and as the plain reference. Differentiable, and torch.compile sees through it.
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
