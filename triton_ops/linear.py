"""A linear layer for weights kept in 16 bits."""

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.registration import OPERATORS

_HALVES = (torch.bfloat16, torch.float16)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N]; all of one dtype.

    On a CPU its own implementation reads 16-bit weights once, at the speed of memory, for few rows
    of input.
    """
    return _linear(input.reshape(-1, input.shape[-1]), weight, bias).view(
        *input.shape[:-1], weight.shape[0]
    )


def project(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as `linear` does: by it where it is faster, else by torch's own product. On a CPU,
    torch's product is slow for 16-bit weights, but only it can be differentiated."""
    if weight.device.type == "cpu" and weight.dtype in _HALVES and not weight.requires_grad:
        return linear(rows, weight, bias)
    return functional.linear(rows, weight, bias)


def _fake_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@OPERATORS.define(fake=_fake_linear)
def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [R, K] -> [R, N]"""
    return functional.linear(rows, weight, bias)


@OPERATORS.define(writes=("total",))
def add_linear(total: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Add rows [R, K] times weight [N, K] transposed to total [R, N], in its place; all of one
    dtype."""
    total += functional.linear(rows, weight)
