"""The contract of mixers, and the states that they read and write.

A mixer is the part of a recurrent layer between its first norm and its output matrix. It mixes the
positions of a sequence through states of fixed size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.models.decoder import Linear, TensorParallelGroup
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


def make_states(config: ModelConfig, slots: int, dtype: torch.dtype) -> RecurrentStates:
    """States of one layer on torch's default device, with any content and no segments."""
    recurrent = config.recurrent
    assert recurrent is not None, "some layers of the model have a state"
    mixer, matrix = recurrent.mixer, None
    if mixer.matrix_shape is not None:
        matrix = torch.empty(slots, *mixer.matrix_shape, dtype=torch.float32)
    return RecurrentStates(
        torch.empty(slots, mixer.channels, recurrent.kernel_size - 1, dtype=dtype),
        matrix,
        torch.empty(0, SEGMENT_FIELDS, dtype=torch.int32),
    )


class Mixer(nn.Module):
    """A matrix and a short convolution, which all mixers have. The sizes are those of this rank."""

    def __init__(self, config: ModelConfig, recurrent: RecurrentConfig) -> None:
        super().__init__()
        channels = recurrent.mixer.channels
        rows = sum(recurrent.mixer.matrices(config.hidden_size)[0].rows)
        self.inputs = Linear(config.hidden_size, rows, bias=recurrent.bias)
        self.kernel = nn.Parameter(torch.empty(channels, recurrent.kernel_size))
        self.kernel_bias: nn.Parameter | None = None
        if recurrent.kernel_bias:
            self.kernel_bias = nn.Parameter(torch.zeros(channels))

    def forward(
        self, hidden: Tensor, states: RecurrentStates, group: TensorParallelGroup
    ) -> Tensor:
        """Normed hidden states [T, hidden_size] -> [T, output_size]; `group` are the ranks that
        compute the layer together."""
        raise NotImplementedError

    def convolve(self, inputs: Tensor, states: RecurrentStates, *, silu: bool) -> Tensor:
        """Run the convolution over inputs [T, channels]; see `causal_convolution`."""
        convolved = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        causal_convolution(
            convolved,
            inputs,
            self.kernel,
            self.kernel_bias,
            states.convolution,
            states.segments,
            silu=silu,
        )
        return convolved
