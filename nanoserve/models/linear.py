"""Layers of one matrix: torch's, without its initialization, and with the operator made for them where there is one.

A Decoder draws its own first weights, if any. torch would draw others before.
"""

from torch import Tensor, nn

from triton_ops import project


class Linear(nn.Linear):
    """torch's layer, computed by `project`; its first weights are not set."""

    def reset_parameters(self) -> None:
        """Whoever makes the layer fills it."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """torch's layer; its first weights are not set."""

    def reset_parameters(self) -> None:
        """Whoever makes the layer fills it."""
