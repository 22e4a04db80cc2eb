"""Feed-forward parts of layers with a mixture of experts (MoE)."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import MoeConfig
from nanoserve.models.decoder import FeedForward, Linear, RMSNorm
from triton_ops import sparse_experts


class SharedExperts(FeedForward):
    """The experts that every token goes through, as one; where they have a gate, their output is
    multiplied by its sigmoid."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__(replace(config, intermediate_size=moe.shared_size))
        self.gate: Linear | None = None
        if moe.gates_shared:
            self.gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        if self.gate is None:
            return output
        opened: Tensor = self.gate(hidden).sigmoid()
        return output * opened


class SparseExperts(nn.Module):
    """A sparse mixture of experts (MoE): a router picks `experts_per_token` experts for every
    token, and their outputs are added, weighted. Shared experts are one more expert, without a
    weight of the router. Each subclass keeps the experts' matrices in its own form."""

    moe: MoeConfig
    router: Linear
    correction_bias: nn.Parameter | None
    shared: SharedExperts
    router_scale: nn.Parameter
    expert_scale: nn.Parameter
    input_norm: RMSNorm
    gate_up_bias: nn.Parameter
    down_bias: nn.Parameter

    @property
    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Biases of gate_up and down of all experts; None where the family has none."""
        if self.moe.style != "gpt_oss":
            return None
        return self.gate_up_bias, self.down_bias

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]"""
        weights, experts = route(self.router(hidden), self.moe, self.correction_bias)
        output = self.compute(hidden, weights, experts)
        if self.moe.shared_size:
            output = output + self.shared(hidden)
        return output

    def apart(self, normed: Tensor, hidden: Tensor) -> Tensor:
        """Hidden states after the norm of the shared experts, and before it, [T, hidden_size] both
        -> the output of the shared experts, and beside it that of the others, [T, 2 *
        hidden_size]."""
        size = hidden.shape[-1]
        uniform = functional.rms_norm(hidden.float(), (size,), eps=self.input_norm.eps)
        scaled = uniform * (self.router_scale.float() * size**-0.5)
        logits = self.router(scaled.to(hidden.dtype))
        weights, experts = route(logits, self.moe, self.correction_bias)
        weights = weights * self.expert_scale[experts]
        output = self.compute(self.input_norm(hidden), weights, experts)
        return torch.cat((self.shared(normed), output), dim=-1)

    def compute(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """hidden [T, hidden_size]; weights and experts as `route` returns them -> [T,
        hidden_size]"""
        raise NotImplementedError


class MixtureOfExperts(SparseExperts):
    """Experts whose matrices are numbers."""

    def __init__(self, config: ModelConfig, moe: MoeConfig) -> None:
        super().__init__()
        self.moe = moe
        num_experts = moe.num_experts
        hidden_size = config.hidden_size
        inner = moe.intermediate_size
        self.correction_bias = None
        if moe.corrects_choice:
            self.correction_bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32))
        if moe.shared_size:
            self.shared = SharedExperts(config, moe)
        if moe.norms_apart:
            self.router_scale = nn.Parameter(torch.ones(hidden_size))
            self.expert_scale = nn.Parameter(torch.ones(num_experts))
            self.input_norm = RMSNorm(hidden_size, config.norms.eps, config.norms.kind)
        biased = moe.style == "gpt_oss"
        self.router = Linear(hidden_size, num_experts, bias=biased)
        rows = 2 * inner if moe.is_gated else inner
        self.gate_up = nn.Parameter(torch.empty(num_experts, rows, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, inner))
        if biased:
            self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, 2 * inner))
            self.down_bias = nn.Parameter(torch.zeros(num_experts, hidden_size))

    def compute(self, hidden: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return sparse_experts(
            hidden, weights, experts, self.gate_up, self.down, self.biases, self.moe.style
        )


def route(logits: Tensor, moe: MoeConfig, correction_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """logits [T, num_experts] -> weights, float32 [T, experts_per_token], and the experts they
    belong to, int64, same shape. The bias, float32 [num_experts], takes part in the choice
    alone."""
    if moe.scores == "softmax":
        scores = functional.softmax(logits, dim=-1, dtype=torch.float32)
        judging = 1
    else:
        scores = logits.float().sigmoid()
        judging = 2
    choice = scores
    if correction_bias is not None:
        choice = scores + correction_bias
    if moe.num_groups > 1:
        choice = _best_groups(choice, moe, judging)
    experts = choice.topk(moe.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, experts)
    if moe.normalize_weights:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + moe.sum_eps)
    if moe.weight_scale != 1.0:
        weights = weights * moe.weight_scale
    return weights, experts


def _best_groups(scores: Tensor, moe: MoeConfig, judging: int) -> Tensor:
    """Scores [T, num_experts] with -inf for experts outside a token's best groups. A group is as
    good as the sum of its `judging` best experts."""
    by_group = scores.view(-1, moe.num_groups, moe.num_experts // moe.num_groups)
    quality = by_group.topk(judging, dim=-1).values.sum(-1)
    chosen = quality.topk(moe.groups_per_token, dim=-1).indices
    is_other = torch.ones_like(quality, dtype=torch.bool)
    is_other = is_other.scatter(-1, chosen, value=False)
    return by_group.masked_fill(is_other[..., None], -torch.inf).flatten(-2)
