"""Mixture of experts: the router, and the operator that sends tokens through the experts it picked."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config import MoeConfig
from nanoserve.models.linear import Linear
from triton_ops import sparse_experts


class SparseExperts(nn.Module):
    """A router picks `experts_per_token` SwiGLU experts for every token; their outputs are added, weighted."""

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        self.router = Linear(hidden_size, moe.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(moe.num_experts, hidden_size, moe.intermediate_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]"""
        weights, experts = self._route(hidden)
        return sparse_experts(hidden, weights, experts, self.gate_up, self.down)

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """-> weights, float32 [T, experts_per_token], and the experts they belong to, int64, same shape."""
        probabilities = functional.softmax(self.router(hidden), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts
