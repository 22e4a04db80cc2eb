"""How steps run a layer whose attention is computed elsewhere, or not for all rows at once: as its two pieces.

What lies between is up to the step: part of the rows may attend on the device and others on the CPU (APEX, Asynchronous
Overlap), or two sub-batches take turns (NEO, Asymmetric Pipelining).
"""

from typing import Protocol

from torch import Tensor

from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import DecoderLayer, LayerFunction


class LayerPieces(Protocol):
    """Runs the pieces of a layer, each on a batch of any size, its rows in any order."""

    def pre_attention(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden_size], cos, sin [T, 1, rotary_dim / 2] -> query [T, num_heads, head_dim], key, value
        [T, num_kv_heads, head_dim]. T is at least 1."""
        ...

    def post_attention(self, layer: DecoderLayer, attention_output: Tensor, residual: Tensor) -> Tensor:
        """attention_output [T, num_heads * head_dim] and residual [T, hidden_size] -> [T, hidden_size].

        T is at least 1.
        """
        ...


class EagerPieces:
    """LayerPieces: the layer's own methods."""

    def pre_attention(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return layer.pre_attention(hidden, cos, sin)

    def post_attention(self, layer: DecoderLayer, attention_output: Tensor, residual: Tensor) -> Tensor:
        return layer.post_attention(attention_output, residual)


def whole_layer(pieces: LayerPieces) -> LayerFunction:
    """A LayerFunction that runs a layer piece by piece, with attention in between for all its rows."""

    def run(layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction) -> Tensor:
        query, key, value = pieces.pre_attention(layer, hidden, cos, sin)
        return pieces.post_attention(layer, attention(layer.index, query, key, value), hidden)

    return run
