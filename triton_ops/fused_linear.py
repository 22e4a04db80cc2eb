"""The product of few rows with a weight matrix, and what stands before and behind it in a layer."""

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.registration import OPERATORS


def _fake_fused_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    norm_adds_one: bool,
    activation: str,
) -> Tensor:
    outputs = weight.shape[0]
    if activation:
        outputs //= 2
    return rows.new_empty(rows.shape[0], outputs)


@OPERATORS.define(fake=_fake_fused_linear)
def fused_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    norm_adds_one: bool,
    activation: str,
) -> Tensor:
    """Multiply normed rows with a weight, apply an activation, and add a residual: on a GPU, one
    launch.

    rows [R, K]; weight [N, K]; bias [N]; all of one dtype. With a `norm` [K], the rows' RMSNorm is
    multiplied, with the norm's weights, to which one is added if `norm_adds_one`. `activation` is
    "silu", "gelu" (its approximation with tanh) or "" for none. With one, the first half of the
    products are gates: active(gate) * other half, so that there are N / 2 outputs. `residual` is
    added last. Returns [R, N or N / 2]. A GPU computes in float32 and rounds once.

    Raises:
        ValueError: if a GPU's programs would read what is not theirs.
    """
    if norm is not None:
        exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
        exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        scale = norm.to(exact.dtype)
        if norm_adds_one:
            scale = scale + 1.0
        rows = (exact * scale).to(rows.dtype)
    product = functional.linear(rows, weight, bias)
    if activation:
        gate, up = product.chunk(2, dim=-1)
        if activation == "silu":
            product = functional.silu(gate) * up
        else:
            product = functional.gelu(gate, approximate="tanh") * up
    if residual is not None:
        product = residual + product
    return product
