"""A mixture of experts, whose tokens per expert are known only once they are routed."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.linear import project
from triton_ops.packed import PackedFormat, packed_linear
from triton_ops.registration import OPERATORS


def sparse_experts(hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Send every token through its SwiGLU experts and add up what they say, weighted.

    hidden: [T, hidden_size]; weights: [T, experts_per_token], float32; experts: int64, same shape;
    gate_up: [num_experts, 2 * intermediate_size, hidden_size]; down: [num_experts, hidden_size, intermediate_size].
    Returns [T, hidden_size].
    """
    if gate_up.requires_grad:  # an operator cannot be differentiated
        return share_out(hidden, weights, experts, gate_up, down)
    return _sparse_experts(hidden, weights, experts, gate_up, down)


def sparse_packed_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    forms: tuple[PackedFormat, PackedFormat],
) -> Tensor:
    """The same with packed matrices, uint8 [num_experts, blocks of 16 rows, bytes], of these two formats; `inner`
    is the intermediate size."""
    return _sparse_packed_experts(hidden, weights, experts, gate_up, down, inner, list(forms[0]), list(forms[1]))


def _fake_sparse_experts(hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return torch.empty_like(hidden)


@OPERATORS.define(fake=_fake_sparse_experts)
def _sparse_experts(hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """An operator, because a compiler cannot follow sizes that the data decide."""
    return share_out(hidden, weights, experts, gate_up, down)


def _fake_sparse_packed_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    first_form: list[int],
    second_form: list[int],
) -> Tensor:
    return torch.empty_like(hidden)


@OPERATORS.define(fake=_fake_sparse_packed_experts)
def _sparse_packed_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    inner: int,
    first_form: list[int],
    second_form: list[int],
) -> Tensor:
    first, second = PackedFormat(*first_form), PackedFormat(*second_form)

    def compute(share: Tensor, expert: int) -> Tensor:
        gate, up = packed_linear(share, gate_up[expert], None, 2 * inner, first).chunk(2, dim=-1)
        return packed_linear(functional.silu(gate) * up, down[expert], None, hidden.shape[1], second)

    return share_among_experts(hidden, weights, experts, len(gate_up), compute)


def share_out(hidden: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    def compute(share: Tensor, expert: int) -> Tensor:
        gate, up = project(share, gate_up[expert]).chunk(2, dim=-1)
        return project(functional.silu(gate) * up, down[expert])

    return share_among_experts(hidden, weights, experts, len(gate_up), compute)


def share_among_experts(
    hidden: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """The loop goes over experts, never over tokens: the pairs (token, expert) are sorted by expert once, and each
    expert computes its contiguous share."""
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
