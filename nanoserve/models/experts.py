"""Mixture of experts: tokens are sorted by expert, so each expert sees its tokens as one matrix."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config import MoeConfig
from nanoserve.models.linear import Linear, project


class SparseExperts(nn.Module):
    """A router picks `experts_per_token` SwiGLU experts for every token; their outputs are added, weighted.

    The loop goes over experts, never over tokens: the pairs (token, expert) are sorted by expert once, and each
    expert multiplies its contiguous share.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        self.router = Linear(hidden_size, moe.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(moe.num_experts, hidden_size, moe.intermediate_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]"""
        weights, experts = self._route(hidden)
        order = experts.flatten().argsort(stable=True)
        tokens = order // self.moe.experts_per_token
        share_sizes = torch.bincount(experts.flatten(), minlength=self.moe.num_experts).tolist()
        outputs = [
            self._expert(expert, share)
            for expert, share in enumerate(torch.split(hidden[tokens], share_sizes))
            if share.shape[0]
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))

    def _route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """-> weights, float32 [T, experts_per_token], and the experts they belong to, int64, same shape."""
        probabilities = functional.softmax(self.router(hidden), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def _expert(self, expert: int, share: Tensor) -> Tensor:
        gate, up = project(share, self.gate_up[expert]).chunk(2, dim=-1)
        return project(functional.silu(gate) * up, self.down[expert])
