"""Layers with a recurrent state in place of attention.

Such a layer mixes the positions of a sequence through a state of fixed size. A mixer is its part
between the first norm and the output matrix; everything else is a DecoderLayer's.
"""

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import DecoderLayer, Linear
from nanoserve.models.gated_delta_net import GatedDeltaNet
from triton_ops import causal_convolution
from triton_ops.recurrent import SEGMENT_FIELDS


@dataclass(slots=True)
class RecurrentStates:
    """The states of one layer for all sequences, and where the tokens of a step find theirs."""

    convolution: Tensor
    """[slots, channels, kernel_size - 1], in the dtype of hidden states: the last inputs of the
    convolution."""
    matrix: Tensor | None
    """float32 [slots, *matrix_shape], where the layer has a recurrent state beside it."""
    segments: Tensor
    """int32 [N, SEGMENT_FIELDS]; see `triton_ops.recurrent`."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that there are, in order."""
        if self.matrix is None:
            return self.convolution, self.segments
        return self.convolution, self.matrix, self.segments


class StatefulAttention(AttentionFunction, Protocol):
    """An AttentionFunction of a model some of whose layers have a state."""

    def states_of(self, layer: int) -> RecurrentStates:
        """The states of a layer with this index."""


def make_states(config: ModelConfig, slots: int, dtype: torch.dtype) -> RecurrentStates:
    """States of one layer on torch's default device, with any content and no segments."""
    recurrent = config.recurrent
    assert recurrent is not None, "some layers of the model have a state"
    matrix = None
    if recurrent.matrix_shape is not None:
        matrix = torch.empty(slots, *recurrent.matrix_shape, dtype=torch.float32)
    return RecurrentStates(
        torch.empty(slots, recurrent.channels, recurrent.kernel_size - 1, dtype=dtype),
        matrix,
        torch.empty(0, SEGMENT_FIELDS, dtype=torch.int32),
    )


class ShortConvolution(nn.Module):
    """A short convolution between two gates (LFM2, arXiv 2511.23404): C * conv(B * x)."""

    def __init__(self, config: ModelConfig, recurrent: RecurrentConfig) -> None:
        super().__init__()
        self.channels = recurrent.channels
        self.output_size = recurrent.channels
        self.inputs = Linear(config.hidden_size, 3 * recurrent.channels, bias=recurrent.bias)
        self.kernel = nn.Parameter(torch.empty(recurrent.channels, recurrent.kernel_size))
        self.kernel_bias: nn.Parameter | None = None
        if recurrent.bias:
            self.kernel_bias = nn.Parameter(torch.zeros(recurrent.channels))

    def forward(self, hidden: Tensor, states: RecurrentStates) -> Tensor:
        """Normed hidden states [T, hidden_size] -> [T, channels]"""
        before, after, values = self.inputs(hidden).chunk(3, dim=-1)
        convolved = torch.empty_like(values)
        causal_convolution(
            convolved,
            before * values,
            self.kernel,
            self.kernel_bias,
            states.convolution,
            states.segments,
            silu=False,
        )
        return cast(Tensor, after * convolved)


class RecurrentLayer(DecoderLayer):
    """A DecoderLayer that has a mixer with a state where others attend."""

    has_state = True

    def _make_attention(self) -> None:
        config = self.config
        recurrent = config.recurrent
        assert recurrent is not None, "the layer has a state"
        self.mixer: ShortConvolution | GatedDeltaNet
        if recurrent.delta_net is None:
            self.mixer = ShortConvolution(config, recurrent)
        else:
            self.mixer = GatedDeltaNet(config, recurrent, recurrent.delta_net)
        self.output = Linear(self.mixer.output_size, config.hidden_size, bias=recurrent.bias)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        return self.post_attention(self.mix(hidden, attention), hidden)

    def mix(self, hidden: Tensor, attention: AttentionFunction) -> Tensor:
        """hidden [T, hidden_size] -> the first argument of `post_attention`, [T, output_size]."""
        states = cast(StatefulAttention, attention).states_of(self.index)
        mixed: Tensor = self.mixer(self.attention_norm(hidden), states)
        return mixed

    def of_tensors(self, hidden: Tensor, *tensors: Tensor) -> Tensor:
        """Run the layer on hidden states and the tensors of its RecurrentStates."""
        convolution, *matrix, segments = tensors
        states = RecurrentStates(convolution, matrix[0] if matrix else None, segments)
        return self.post_attention(self.mixer(self.attention_norm(hidden), states), hidden)

    def project_attention(self, attention_output: Tensor, residual: Tensor) -> Tensor:
        projected: Tensor = self.output(attention_output)
        return projected
