"""A mixture of experts, whose tokens per expert are known only once they are routed."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.linear import project
from triton_ops.packed import PackedFormat, packed_linear
from triton_ops.registration import OPERATORS

ExpertStyle = Literal["swiglu", "geglu", "gpt_oss", "relu2"]
"""SwiGLU or GEGLU (arXiv 2002.05202), this with GELU's usual approximation; or as in gpt-oss (arXiv
2508.10925): gate and up are bounded, up is increased by 1, and their rows take turns; or the square
of what is positive (arXiv 2109.08668), where gate_up is one matrix of intermediate_size rows."""
_BOUND, _STEEPNESS = 7.0, 1.702


def sparse_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
    style: ExpertStyle = "swiglu",
) -> Tensor:
    """Send every token through its experts and add up what they say, weighted.

    hidden: [T, hidden_size]; weights: [T, experts_per_token], float32; experts: int64, same shape;
    gate_up: [num_experts, 2 * intermediate_size, hidden_size]; down: [num_experts, hidden_size,
    intermediate_size]; biases: those of gate_up [num_experts, 2 * intermediate_size] and of down
    [num_experts, hidden_size]. Returns [T, hidden_size].
    """
    inputs = (hidden, weights, experts, gate_up, down, *(biases or (None, None)), style)
    if gate_up.requires_grad:  # an operator cannot be differentiated
        return share_out(*inputs)
    return _sparse_experts(*inputs)


def sparse_packed_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    forms: tuple[PackedFormat, PackedFormat],
    biases: tuple[Tensor, Tensor] | None = None,
    style: ExpertStyle = "swiglu",
) -> Tensor:
    """Compute `sparse_experts` with packed matrices, uint8 [num_experts, blocks of 16 rows, bytes],
    of these two formats; `inner` is the intermediate size."""
    gate_up_bias, down_bias = biases or (None, None)
    first, second = list(forms[0]), list(forms[1])
    return _sparse_packed_experts(
        hidden,
        weights,
        experts,
        gate_up,
        down,
        inner,
        first,
        second,
        gate_up_bias,
        down_bias,
        style,
    )


def _like_hidden(hidden: Tensor, *inputs: object) -> Tensor:
    return torch.empty_like(hidden)


@OPERATORS.define(fake=_like_hidden)
def _sparse_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    """An operator, because a compiler cannot follow sizes that the data decide."""
    return share_out(hidden, weights, experts, gate_up, down, gate_up_bias, down_bias, style)


@OPERATORS.define(fake=_like_hidden)
def _sparse_packed_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    first_form: list[int],
    second_form: list[int],
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    return share_out_packed(
        hidden,
        weights,
        experts,
        gate_up,
        down,
        inner,
        first_form,
        second_form,
        gate_up_bias,
        down_bias,
        style,
    )


def share_out_packed(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    first_form: list[int],
    second_form: list[int],
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    first, second = PackedFormat(*first_form), PackedFormat(*second_form)
    rows = inner if style == "relu2" else 2 * inner

    def compute(share: Tensor, expert: int) -> Tensor:
        inside = packed_linear(share, gate_up[expert], _of(gate_up_bias, expert), rows, first)
        return packed_linear(
            gated(inside, style), down[expert], _of(down_bias, expert), hidden.shape[1], second
        )

    return share_among_experts(hidden, weights, experts, len(gate_up), compute)


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]


def gated(gate_up: Tensor, style: str) -> Tensor:
    """gate_up [..., 2 n], the products of both -> [..., n], what enters `down`."""
    if style == "relu2":
        return functional.relu(gate_up).square()
    if style == "swiglu":
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
    if style == "geglu":
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up
    gate, up = gate_up[..., ::2].clamp(max=_BOUND), gate_up[..., 1::2].clamp(-_BOUND, _BOUND)
    return (up + 1) * gate * torch.sigmoid(_STEEPNESS * gate)


def share_out(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    def compute(share: Tensor, expert: int) -> Tensor:
        inside = project(share, gate_up[expert], _of(gate_up_bias, expert))
        return project(gated(inside, style), down[expert], _of(down_bias, expert))

    return share_among_experts(hidden, weights, experts, len(gate_up), compute)


def share_among_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    compute: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """The loop goes over experts, never over tokens: the pairs (token, expert) are sorted by expert
    once, and each expert computes its contiguous share."""
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    share_sizes = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    outputs = [
        compute(share, expert)
        for expert, share in enumerate(torch.split(hidden[tokens], share_sizes))
        if share.shape[0]
    ]
    weighted = torch.cat(outputs) * weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))
