"""Linear layers that take the operator made for them where there is one."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from triton_ops import linear

_HALVES = (torch.bfloat16, torch.float16)


def project(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N].

    torch's own product is slow for 16-bit weights on a CPU, but the only one that can be differentiated.
    """
    if weight.device.type == "cpu" and weight.dtype in _HALVES and not weight.requires_grad:
        return linear(rows, weight, bias)
    return functional.linear(rows, weight, bias)


class Linear(nn.Linear):
    """torch's layer, computed by `project`."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias)
