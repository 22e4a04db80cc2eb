"""A mixture of experts on a GPU, by torch's product of groups of rows with a matrix each."""

import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.experts import gated, share_out
from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.packed_constants import most_tokens_of_experts

_GENERATIONS_WITH_GROUPED_PRODUCTS = (9, 10)
"""Elsewhere, and in other types than bfloat16, torch multiplies group by group and waits to learn
their sizes."""

MULTIPLIED_PACKED = (torch.bfloat16, torch.float16)
"""Types of rows that packed matrices are multiplied with; for others they are unpacked."""

_ALIGNMENT = 8  # elements of bfloat16 in the 16 bytes at which the product's rows must begin


def sparse_experts(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    """`triton_ops.sparse_experts`, without waiting for the GPU wherever torch has a product that
    does not."""
    rest = gate_up_bias, down_bias, style
    widths = (hidden.shape[1], down.shape[2])
    if hidden.dtype == gate_up.dtype and never_waits(hidden.dtype, hidden.device, widths):
        return multiply_in_groups(hidden, weights, experts, gate_up, down, *rest)
    return share_out(hidden, weights, experts, gate_up, down, *rest)


def never_waits(dtype: torch.dtype, device: torch.device, widths: tuple[int, int]) -> bool:
    """Whether experts of that dtype, with a hidden_size and an intermediate_size, are multiplied
    without waiting for the GPU: a step with others cannot be captured."""
    return (
        dtype == torch.bfloat16
        and gpu_of(device).generation in _GENERATIONS_WITH_GROUPED_PRODUCTS
        and all(width % _ALIGNMENT == 0 for width in widths)
    )


def most_captured_tokens(dtype: torch.dtype, num_experts: int, experts_per_token: int) -> int:
    """The most tokens of that dtype that packed experts take without waiting for the GPU."""
    if dtype not in MULTIPLIED_PACKED:
        return 0
    return most_tokens_of_experts(num_experts, experts_per_token)


def multiply_in_groups(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    style: str = "swiglu",
) -> Tensor:
    """The pairs (token, expert) sorted by expert are one group of rows for each; where a group ends
    stays on the GPU.

    Shapes as in `triton_ops.sparse_experts`, hidden_size and intermediate_size in multiples of 16
    bytes.
    """
    pairs, order = experts.flatten().sort(stable=True)
    all_experts = torch.arange(gate_up.shape[0], device=pairs.device)
    ends = torch.searchsorted(pairs, all_experts, right=True, out_int32=True)
    shares = hidden[order // experts.shape[1]]
    inside = functional.grouped_mm(shares, gate_up.transpose(1, 2), offs=ends)
    inside = inside if gate_up_bias is None else inside + gate_up_bias[pairs]
    outputs = functional.grouped_mm(gated(inside, style), down.transpose(1, 2), offs=ends)
    outputs = outputs if down_bias is None else outputs + down_bias[pairs]
    by_token = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return add_up_experts(by_token, weights, hidden.dtype)


def add_up_experts(outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Add up outputs of experts, token after token [T * experts_per_token, N], with weights [T,
    experts_per_token]: [T, N]."""
    weighted: Tensor = outputs.view(*weights.shape, -1) * weights[..., None]
    return weighted.sum(1).to(dtype)
