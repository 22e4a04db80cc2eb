"""Layers with a recurrent state in place of attention.

Such a layer mixes the positions of a sequence through a state of fixed size. A mixer is its part
between the first norm and the output matrix; everything else is a DecoderLayer's.
"""

from typing import Protocol, cast

from torch import Tensor

from nanoserve.config.mixers import (
    GatedDeltaNetConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvolutionConfig,
)
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import DecoderLayer, Linear, TensorParallelGroup
from nanoserve.models.gated_delta_net import GatedDeltaNet
from nanoserve.models.mamba import Mamba, Mamba2
from nanoserve.models.mixer import Mixer, RecurrentStates


class StatefulAttention(AttentionFunction, Protocol):
    """An AttentionFunction of a model some of whose layers have a state."""

    def states_of(self, layer: int) -> RecurrentStates:
        """The states of a layer with this index."""


class ShortConvolution(Mixer):
    """A short convolution between two gates (LFM2, arXiv 2511.23404): C * conv(B * x)."""

    def forward(
        self, hidden: Tensor, states: RecurrentStates, _group: TensorParallelGroup
    ) -> Tensor:
        before, after, values = self.inputs(hidden).chunk(3, dim=-1)
        return cast(Tensor, after * self.convolve(before * values, states, silu=False))


def make_mixer(config: ModelConfig, recurrent: RecurrentConfig) -> Mixer:
    """Make the mixer of a layer with these sizes."""
    mixer = recurrent.mixer
    if isinstance(mixer, GatedDeltaNetConfig):
        return GatedDeltaNet(config, recurrent, mixer)
    if isinstance(mixer, Mamba2Config):
        return Mamba2(config, recurrent, mixer)
    if isinstance(mixer, MambaConfig):
        return Mamba(config, recurrent, mixer)
    assert isinstance(mixer, ShortConvolutionConfig)
    return ShortConvolution(config, recurrent)


class RecurrentLayer(DecoderLayer):
    """A DecoderLayer that has a mixer with a state where others attend."""

    has_state = True

    def _make_attention(self) -> None:
        config = self.config
        recurrent = config.recurrent
        assert recurrent is not None, "the layer has a state"
        self.mixer = make_mixer(config, recurrent)
        self.output = Linear(recurrent.mixer.output_size, config.hidden_size, bias=recurrent.bias)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        return self.post_attention(self.mix(hidden, attention), hidden)

    def mix(self, hidden: Tensor, attention: AttentionFunction) -> Tensor:
        """hidden [T, hidden_size] -> the first argument of `post_attention`, [T, output_size]."""
        states = cast(StatefulAttention, attention).states_of(self.index)
        mixed: Tensor = self.mixer(self.attention_norm(hidden), states, self.group)
        return mixed

    def of_tensors(self, hidden: Tensor, *tensors: Tensor) -> Tensor:
        """Run the layer on hidden states and the tensors of its RecurrentStates."""
        convolution, *matrix, segments = tensors
        states = RecurrentStates(convolution, matrix[0] if matrix else None, segments)
        mixed = self.mixer(self.attention_norm(hidden), states, self.group)
        return self.post_attention(mixed, hidden)

    def project_attention(self, attention_output: Tensor, residual: Tensor) -> Tensor:
        projected: Tensor = self.output(attention_output)
        return projected
