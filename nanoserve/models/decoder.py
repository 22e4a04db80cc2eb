"""The decoder: every supported family is this code with other fields in its ModelConfig.

A layer is two pieces with attention between them. Attention is a callable that is passed in, so the
same layers train, serve from a paged cache, or hand attention to another device. A decoder may be
one shard of a model: some of the layers, and in each layer some of the heads and part of the inner
size. A layer knows only its own sizes and its group.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import MlaConfig, MoeConfig, NormKind, RopeConfig
from nanoserve.models.attention import (
    AttentionFunction,
    CanvasInputs,
    PagedAttention,
    takes_projected,
)
from nanoserve.models.shards import Shard, divided, shard_config, whole_model
from triton_ops import add_linear, project, sparse_experts

INITIAL_STANDARD_DEVIATION = 0.02
_VOCABULARY_PIECE = 8192
"""Tokens whose embeddings are added up at a time."""
_LATENT_EPS = 1e-6  # whatever rms_norm_eps is, as transformers has it


class TensorParallelGroup(Protocol):
    """The ranks that compute one stage together. All of them call the same methods in the same
    order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on every rank. May reuse its argument."""

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[N, C] of every rank -> [N, degree * C] on rank 0, side by side in the order of ranks;
        None elsewhere."""


class SingleRank:
    """A TensorParallelGroup with one rank: its tensors are the results."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor | None:
        return tensor


SINGLE_RANK = SingleRank()


class Linear(nn.Linear):
    """torch's layer, computed by `project`. Its first weights are not set: a Decoder draws its own,
    if any."""

    def reset_parameters(self) -> None:
        """Leave the weights to the code that makes the layer."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias)


class VocabularyShard(nn.Module):
    """The rows of an embedding that one rank holds: all tokens, or those from `first_row` on."""

    num_embeddings: int
    first_row: int

    def known(self, token_ids: Tensor) -> Tensor:
        """token_ids [T], of the whole vocabulary -> [T, embedding_dim]; zeros for tokens that other
        parts hold."""
        rows = token_ids - self.first_row
        unknown = (rows < 0) | (rows >= self.num_embeddings)
        some_row = rows.masked_fill(unknown, 0)
        found: Tensor = self(some_row)
        return found.masked_fill(unknown[:, None], 0.0)

    def rows(self, first: int, after: int) -> Tensor:
        """The embeddings of the tokens from `first` on, before `after`, [after - first,
        embedding_dim]."""
        raise NotImplementedError


class VocabParallelEmbedding(nn.Embedding, VocabularyShard):
    """A rank's rows of an embedding, as vLLM's layer of this name. The weights are not
    initialized."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, first_row: int = 0) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.first_row = first_row

    def reset_parameters(self) -> None:
        """Leave the weights to the code that makes the layer."""

    def rows(self, first: int, after: int) -> Tensor:
        return self.weight[first:after]


class RotaryEmbedding(nn.Module):
    """The cosines and sines that rotate queries and keys to their positions (arXiv 2104.09864).

    The frequencies are made on the CPU in float32, whatever the default device and dtype are, so
    that a model in bf16 still rotates by exact angles. Cast a model by loading it in that dtype,
    not with `.to(dtype)`.
    """

    inverse_frequencies: Tensor

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.rope = rope
        self.attention_factor = _attention_factor(rope)
        self.register_buffer("inverse_frequencies", _inverse_frequencies(rope), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions, int64 [T] -> cosines and sines of this dtype, computed in float32, [T, 1,
        rotary_dim // 2] (the 1 spreads over heads). Where queries grow with their position, [T, 2,
        rotary_dim // 2]: those of keys, then those of queries."""
        # an integer times a float32 number is computed in float32
        angles = positions[:, None, None] * self.inverse_frequencies
        rope = self.rope
        if self.attention_factor == 1.0 and not rope.query_growth:
            # Most models take this way. Each operator rounds its own results: three launches.
            cos = torch.empty_like(angles, dtype=dtype)
            sin = torch.empty_like(angles, dtype=dtype)
            return torch.cos(angles, out=cos), torch.sin(angles, out=sin)
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        if rope.query_growth:
            turns = positions // rope.original_max_position_embeddings
            logarithms = (1 + turns.float()).log()
            growth = 1 + rope.query_growth * logarithms[:, None, None]
            cos = torch.cat((cos, cos * growth), dim=1)
            sin = torch.cat((sin, sin * growth), dim=1)
        return cos.to(dtype), sin.to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, rope: RopeConfig) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of heads [T, H, head_dim] by the angles of their
    positions."""
    turning = heads[..., : rope.rotary_dim]
    if rope.interleaved:
        first = turning[..., 0::2]
        second = turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if rope.interleaved:
        turned = torch.stack((turned_first, turned_second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((turned_first, turned_second), dim=-1)
    if rope.rotary_dim == heads.shape[-1]:
        return turned
    still = heads[..., rope.rotary_dim :]
    return torch.cat((turned, still), dim=-1)


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension, computed in float32 (arXiv
    1910.07467); or one of the other kinds of `NormConfig`."""

    def __init__(self, size: int, eps: float, kind: NormKind = "rms") -> None:
        super().__init__()
        initial = torch.ones(size)
        if kind == "rms_plus_one":
            initial = torch.zeros(size)
        self.weight = nn.Parameter(initial)
        self.eps = eps
        self.kind = kind

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kind == "rms" and hidden.is_cuda and not torch.compiler.is_compiling():
            # One launch, for torch has a kernel of it; what follows is eight, unless a compiler
            # joins them.
            return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        exact = hidden.float()
        if self.kind == "layer":
            exact = exact - exact.mean(-1, keepdim=True)
        mean_square = exact.square().mean(-1, keepdim=True)
        return self.scale(exact, mean_square, hidden.dtype)

    def scale(self, exact: Tensor, mean_square: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of float32 numbers, whose mean square is known, in this dtype."""
        normed = exact * torch.rsqrt(mean_square + self.eps)
        if self.kind == "rms":
            return self.weight * normed.to(dtype)
        weight = self.weight.float()
        if self.kind == "rms_plus_one":
            weight = 1.0 + weight
        return (normed * weight).to(dtype)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), gate and up in one matrix; or with
    another activation, and perhaps without a gate: down(active(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.feed_forward.activation
        self.is_gated = config.feed_forward.is_gated
        rows = config.intermediate_size
        if self.is_gated:
            rows *= 2
        self.gate_up = Linear(config.hidden_size, rows, bias=config.feed_forward.bias)
        self.down = Linear(
            config.intermediate_size, config.hidden_size, bias=config.feed_forward.bias
        )

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(self.inside(hidden))
        return output

    def inside(self, hidden: Tensor) -> Tensor:
        """Compute what the last product takes, [T, intermediate_size]."""
        projected: Tensor = self.gate_up(hidden)
        if not self.is_gated:
            return self._activate(projected)
        gate, up = projected.chunk(2, dim=-1)
        return self._activate(gate) * up

    def _activate(self, inside: Tensor) -> Tensor:
        if self.activation == "silu":
            return functional.silu(inside)
        if self.activation == "relu2":
            return functional.relu(inside).square()
        return functional.gelu(inside, approximate="tanh")


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


class MultiHeadLatentAttention(nn.Module):
    """The projections of multi-head latent attention, MLA (arXiv 2405.04434, section 2.1).

    The matrices are absorbed: the one that makes keys of latents is multiplied with the queries
    instead, and the one that makes values with the output of attention. So attention works on the
    latents themselves: they are keys and values of a single head.
    """

    def __init__(self, config: ModelConfig, mla: MlaConfig) -> None:
        super().__init__()
        self.mla = mla
        self.rope = config.rope
        self.num_heads = config.num_heads
        self.query_size = mla.query_size(config.num_heads)
        if mla.q_lora_rank:
            self.query_norm = RMSNorm(mla.q_lora_rank, _LATENT_EPS)
            self.query_up = Linear(mla.q_lora_rank, self.query_size, bias=False)
        self.latent_norm = RMSNorm(mla.kv_lora_rank, _LATENT_EPS)
        self.latent_up = Linear(mla.kv_lora_rank, mla.expanded_size(config.num_heads), bias=False)

    @property
    def sizes(self) -> list[int]:
        """Columns of a layer's first product: of queries, or the latents they are made of; of
        latents and keys."""
        mla = self.mla
        query = mla.q_lora_rank
        if query == 0:
            query = self.query_size
        return [query, mla.kv_lora_rank + mla.qk_rope_head_dim]

    def absorb(self, projected: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """projected [T, sum of sizes] -> query [T, num_heads, head_dim], key [T, 1, head_dim], and
        its first columns [T, 1, kv_lora_rank]."""
        mla = self.mla
        query, cached = torch.split(projected, self.sizes, dim=-1)
        if mla.q_lora_rank:
            query = self.query_up(self.query_norm(query))
        query = query.view(-1, self.num_heads, mla.query_size(1))
        still = query[..., : mla.qk_nope_head_dim]
        turning = query[..., mla.qk_nope_head_dim :]
        key_matrix, _ = self._matrices()
        absorbed = torch.einsum("thn,hnr->thr", still, key_matrix)
        turned = rotate(turning, cos, sin, self.rope)
        query = torch.cat((absorbed, turned), dim=-1)
        cached = cached[:, None]
        latent = self.latent_norm(cached[..., : mla.kv_lora_rank])
        turned = rotate(cached[..., mla.kv_lora_rank :], cos, sin, self.rope)
        key = torch.cat((latent, turned), dim=-1)
        return query, key, key[..., : mla.kv_lora_rank]

    def expand(self, attended: Tensor) -> Tensor:
        """Latents that attention has added up, [T, num_heads * kv_lora_rank] -> values [T,
        num_heads * v_head_dim]."""
        _, value_matrix = self._matrices()
        attended = attended.view(-1, self.num_heads, self.mla.kv_lora_rank)
        return torch.einsum("thr,hvr->thv", attended, value_matrix).flatten(1)

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """[num_heads, qk_nope_head_dim, kv_lora_rank] and [num_heads, v_head_dim, kv_lora_rank]."""
        by_head = self.latent_up.weight.view(self.num_heads, -1, self.mla.kv_lora_rank)
        key_rows = self.mla.qk_nope_head_dim
        return by_head[:, :key_rows], by_head[:, key_rows:]


class DecoderLayer(nn.Module):
    """One transformer layer, split where attention happens.

    `config` has the sizes of this rank. Each rank's results of `output` and of the feed-forward
    part are summed over the group. One rank adds the biases; they are zero on the others.
    """

    has_state = False
    """Whether it is a RecurrentLayer."""

    def __init__(
        self, config: ModelConfig, index: int, group: TensorParallelGroup = SINGLE_RANK
    ) -> None:
        super().__init__()
        self.rope = config.rope_kinds.index(config.rope_of(index))
        """Which of the decoder's angles are the layer's own."""
        config = config.of_layer(index)
        self.config = config
        self.index = index
        self.group = group
        self.query_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        if config.norms.before_attention and config.norms.places != "after":
            self.attention_norm = self._norm(config.hidden_size)
        else:
            self.attention_norm = cast(RMSNorm, nn.Identity())
        self._make_attention()
        self.has_feed_forward = config.has_feed_forward(index)
        if self.has_feed_forward:
            self._make_feed_forward()
        if config.norms.places in ("around", "after"):
            self.attention_output_norm = self._norm(config.hidden_size)
            self.feed_forward_output_norm = self._norm(config.hidden_size)
        self.has_parts_apart = (
            config.moe is not None and config.moe.norms_apart and config.is_sparse(index)
        )
        if self.has_parts_apart:
            self.shared_output_norm = self._norm(config.hidden_size)
            self.expert_output_norm = self._norm(config.hidden_size)
        if config.norms.layer_scale:
            self.scale = nn.Parameter(torch.ones(1))
        self.is_scaled_outside = config.embedding.per_layer_size > 0 or config.writes_free_canvases
        """Whether the decoder has the layer's output scaled, and not the layer itself."""
        if config.writes_free_canvases:
            self.canvas_scale = nn.Parameter(torch.ones(1))
        if config.embedding.per_layer_size:
            self.input_gate = Linear(
                config.hidden_size, config.embedding.per_layer_size, bias=False
            )
            self.input_up = Linear(config.embedding.per_layer_size, config.hidden_size, bias=False)
            self.input_norm = self._norm(config.hidden_size)

    def _norm(self, size: int) -> RMSNorm:
        """Make a norm of the family's kind."""
        return RMSNorm(size, self.config.norms.eps, self.config.norms.kind)

    def _make_feed_forward(self) -> None:
        """Make the feed-forward part and the norm before it."""
        config = self.config
        if config.norms.places in ("before", "around"):
            self.feed_forward_norm = self._norm(config.hidden_size)
        self.feed_forward: nn.Module
        if config.moe is not None and config.is_sparse(self.index):
            self.feed_forward = MixtureOfExperts(config, config.moe)
        else:
            self.feed_forward = FeedForward(config)

    def _make_attention(self) -> None:
        """Make the matrices and norms of attention."""
        config = self.config
        if config.attention.mla is not None:
            self.latent = MultiHeadLatentAttention(config, config.attention.mla)
            width = sum(self.latent.sizes)
        else:
            width = sum(config.qkv_sizes)
        self.qkv = Linear(config.hidden_size, width, bias=config.attention.qkv_bias)
        if config.attention.output_gate:
            self.output_gate = Linear(
                config.hidden_size, config.output_size, bias=config.attention.qkv_bias
            )
        if config.attention.qk_norm:
            query_size = key_size = config.head_dim
            if config.attention.qk_norm_spans_heads:
                query_size = self.query_size
                key_size = self.kv_size
            self.query_norm = self._norm(query_size)
            if config.attention.has_kv:
                self.key_norm = self._norm(key_size)
        if config.attention.sinks:
            self.sinks = nn.Parameter(torch.zeros(config.num_heads))
        self.output = Linear(
            config.output_size, config.hidden_size, bias=config.attention.output_bias
        )

    def pre_attention(
        self, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden_size] -> query [T, num_heads, head_dim], key, value [T, num_kv_heads,
        head_dim]; query and key are rotated to the positions of cos and sin. Values of latents are
        narrower. Without keys and values of its own a layer returns them without heads."""
        config = self.config
        projected = self.qkv(self.attention_norm(hidden))
        if config.attention.mla is not None:
            return self.latent.absorb(projected, cos, sin)
        if not config.attention.has_kv:
            query = projected.view(-1, config.num_heads, config.head_dim)
            if config.attention.qk_norm:
                query = self.query_norm(query)
            query = rotate(query, cos, sin, config.rope)
            return query, query[:, :0], query[:, :0]
        parts = projected.split(config.qkv_sizes, dim=-1)
        query = parts[0]
        key = parts[1]
        value = parts[-1]  # the key, where one matrix makes both
        if config.attention.qk_norm_spans_heads:
            query, key = self._norm_all_heads(query, key)
        query = query.view(-1, config.num_heads, config.head_dim)
        key = key.view(-1, config.num_kv_heads, config.head_dim)
        value = value.view(-1, config.num_kv_heads, config.head_dim)
        if config.attention.qk_norm and not config.attention.qk_norm_spans_heads:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if config.attention.value_norm:
            normed = functional.rms_norm(value.float(), value.shape[-1:], eps=config.norms.eps)
            value = normed.to(value.dtype)
        if config.rope.query_growth:
            query = rotate(query, cos[:, 1:], sin[:, 1:], config.rope)
            key = rotate(key, cos[:, :1], sin[:, :1], config.rope)
        else:
            query = rotate(query, cos, sin, config.rope)
            key = rotate(key, cos, sin, config.rope)
        return query, key, value

    def _norm_all_heads(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Norms over the heads of all ranks, of queries [T, query_size] and keys [T, kv_size]. A
        key that several ranks hold counts as often, like all others."""
        exact_query = query.float()
        exact_key = key.float()
        query_square = exact_query.square().mean(-1, keepdim=True)
        key_square = exact_key.square().mean(-1, keepdim=True)
        ranks = torch.ones_like(query_square)
        own = torch.cat((query_square, key_square, ranks), dim=-1)
        summed = self.group.all_reduce(own)
        means = summed[:, :2] / summed[:, 2:]
        normed_query = self.query_norm.scale(exact_query, means[:, :1], query.dtype)
        normed_key = self.key_norm.scale(exact_key, means[:, 1:], key.dtype)
        return normed_query, normed_key

    def post_attention(
        self, attention_output: Tensor, residual: Tensor, between_sums: "BetweenSums | None" = None
    ) -> Tensor:
        """attention_output [T, num_heads * value_dim] and residual [T, hidden_size] -> [T,
        hidden_size]; `between_sums` may be compiled."""
        config = self.config
        attended = self.project_attention(attention_output, residual)
        if not self.has_feed_forward:
            return residual + self._scaled(self.group.all_reduce(attended))
        if config.norms.places == "shared":
            fed = self.feed_forward(self.attention_norm(residual))
            return residual + self._scaled(self.group.all_reduce(attended + fed))
        if between_sums is None:
            if adds_in_place(self, residual.device):
                return self._add_feed_forward(residual, attended)
            between_sums = self.between_sums
        fed, residual = between_sums(self.group.all_reduce(attended), residual)
        fed = self.group.all_reduce(fed)
        if self.has_parts_apart:
            of_shared, of_experts = fed.chunk(2, dim=-1)
            fed = self.shared_output_norm(of_shared) + self.expert_output_norm(of_experts)
        if config.norms.places in ("around", "after"):
            fed = self.feed_forward_output_norm(fed)
        fed = self._scaled(fed)
        # The sum is in float32 so that torch's compiler does not join it with the product before
        # it: a GPU would copy the residual first, and take a slower product (see adds_in_place).
        output: Tensor = (residual.float() + fed.float()).to(residual.dtype)
        if config.norms.layer_scale and not self.is_scaled_outside:
            output = output * self.scale
        return output

    def _add_feed_forward(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add the output of attention, [T, hidden_size], and then the feed-forward part, the latter
        in the place of the first sum.

        The first sum is written twice, so that what is added to is not what the norm reads: torch's
        compiler makes both in one kernel with the norm. Both are in float32, as the sum at the end
        of `post_attention` is, and in another order, so that it does not take them for one.
        """
        feed_forward = cast(FeedForward, self.feed_forward)
        normed = (attended.float() + residual.float()).to(residual.dtype)
        inside = feed_forward.inside(self.feed_forward_norm(normed))
        total = (residual.float() + attended.float()).to(residual.dtype)
        add_linear(total, inside, feed_forward.down.weight)
        return total

    def scale_output(self, hidden: Tensor, canvas: CanvasInputs | None) -> Tensor:
        """Multiply the layer's output, [T, hidden_size], by the layer's number for known tokens or
        by that for canvases."""
        if canvas is None:
            return hidden * self.scale
        return hidden * torch.where(canvas.is_canvas[:, None], self.canvas_scale, self.scale)

    def _scaled(self, added: Tensor) -> Tensor:
        """The addend of a part of the layer, multiplied by the family's factor."""
        multiplier = self.config.residual_multiplier
        if multiplier == 1.0:
            return added
        return added * multiplier

    def project_attention(self, attention_output: Tensor, residual: Tensor) -> Tensor:
        """From the arguments of `post_attention` to this rank's addend of attention, [T,
        hidden_size]."""
        attention = self.config.attention
        if attention.mla is not None:
            attention_output = self.latent.expand(attention_output)
        if attention.output_gate:
            # Made here, and not with the query, so that nothing else passes around attention.
            gate = self.output_gate(self.attention_norm(residual))
            attention_output = attention_output * gate.sigmoid()
        attended: Tensor = self.output(attention_output)
        return attended

    def add_per_layer_input(self, hidden: Tensor, per_layer_input: Tensor) -> Tensor:
        """Add the layer's embedding of each token, [T, per_layer_input_size], gated by the hidden
        states, to the hidden states after the feed-forward part, [T, hidden_size]."""
        gate = functional.gelu(self.input_gate(hidden), approximate="tanh")
        added = self.input_up(gate * per_layer_input)
        output: Tensor = hidden + self.input_norm(added)
        if self.config.norms.layer_scale:
            output = output * self.scale
        return output

    def between_sums(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """From one sum over the group to the next: attended and residual [T, hidden_size] -> this
        rank's addend of the feed-forward part, and the residual that the sum is added to, [T,
        hidden_size] each. Of two parts side by side, there are two addends, [T, 2 * hidden_size].
        """
        norms = self.config.norms.places
        if norms in ("around", "after"):
            attended = self.attention_output_norm(attended)
        residual = residual + self._scaled(attended)
        normed = residual
        if norms != "after":
            normed = self.feed_forward_norm(residual)
        if self.has_parts_apart:
            return cast(SparseExperts, self.feed_forward).apart(normed, residual), residual
        fed: Tensor = self.feed_forward(normed)
        return fed, residual

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        return self.post_attention(self.attended(hidden, cos, sin, attention), hidden)

    def attended(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        """From hidden states [T, hidden_size] to the first argument of `post_attention`."""
        if takes_projected(attention, self.config, hidden.device):
            projected = self.qkv(self.attention_norm(hidden))
            return self._attend_to_projected(attention, projected, cos, sin)
        query, key, value = self.pre_attention(hidden, cos, sin)
        return self.attend(attention, query, key, value)

    def attend(
        self, attention: AttentionFunction, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Run attention on the results of `pre_attention`; returns the first argument of
        `post_attention`."""
        return attention(self.index, query, key, value, self._float_sinks())

    def _attend_to_projected(
        self, attention: PagedAttention, projected: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Attend with the product that `pre_attention` begins with, [T, sum of qkv_sizes]."""
        norms: tuple[Tensor | None, Tensor | None] = None, None
        if self.config.attention.qk_norm:
            norms = self.query_norm.weight, self.key_norm.weight
        query = attention.rotate_and_write(self.index, self.config, projected, norms, (cos, sin))
        return attention.attend(self.index, query, self._float_sinks())

    def _float_sinks(self) -> Tensor | None:
        if self.config.attention.sinks:
            return self.sinks.float()
        return None


def adds_in_place(layer: DecoderLayer, device: torch.device) -> bool:
    """Whether the last product of a layer adds its results to the residual, which saves a GPU the
    launch of a sum. It cannot be differentiated, and nothing else may happen to the results."""
    if device.type != "cuda" or torch.is_grad_enabled():
        return False
    if type(layer.feed_forward) is not FeedForward or layer.group is not SINGLE_RANK:
        return False
    config = layer.config
    down = layer.feed_forward.down
    is_plain = type(down) is Linear and down.bias is None
    is_scaled = config.residual_multiplier != 1.0 or config.norms.layer_scale
    return is_plain and not is_scaled and config.norms.places == "before"


Angles = tuple[Tensor, Tensor]
"""The cosines and sines of T tokens."""
BetweenSums = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Computes `DecoderLayer.between_sums`: eagerly, or compiled."""
LayerFunction = Callable[[DecoderLayer, Tensor, Tensor, Tensor, AttentionFunction], Tensor]
"""Runs one layer on hidden states, cosines, sines and an attention function: eagerly, or
compiled."""


class PerLayerEmbeddings(nn.Module):
    """Per-layer embeddings (Gemma 4): every layer has an embedding of its own for each token, to
    which a projection of the common embedding is added."""

    def __init__(self, config: ModelConfig, rows: int, first_row: int) -> None:
        super().__init__()
        self.size = config.embedding.per_layer_size
        self.scale = config.hidden_size**-0.5
        width = config.num_layers * self.size
        self.embedding = VocabParallelEmbedding(rows, width, first_row=first_row)
        self.projection = Linear(config.hidden_size, width, bias=False)
        self.norm = RMSNorm(self.size, config.norms.eps, config.norms.kind)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Rows of the embedding [T, num_layers * size], and hidden states [T, hidden_size] -> [T,
        num_layers, size]"""
        projected = self.projection(hidden) * self.scale
        projected = projected.unflatten(-1, (-1, self.size))
        own = embedded.view_as(projected) * self.size**0.5
        per_layer_inputs: Tensor = (self.norm(projected) + own) * 0.5**0.5
        return per_layer_inputs


class SelfConditioning(nn.Module):
    """Adds to the embeddings of a canvas what its last denoising step expected (DiffusionGemma,
    arXiv 2208.04202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norms.eps, config.norms.kind)
        self.feed_forward = FeedForward(config)
        self.eps = config.norms.eps

    def forward(self, embedded: Tensor, soft_embeddings: Tensor) -> Tensor:
        """[K, hidden_size] both -> [K, hidden_size]"""
        combined = embedded + self.feed_forward(self.norm(soft_embeddings))
        normed = functional.rms_norm(combined.float(), combined.shape[-1:], eps=self.eps)
        return normed.to(embedded.dtype)


class Decoder(nn.Module):
    """Token ids in, hidden states out; logits only for the positions that are asked for.

    Built on torch's default device and dtype with random weights (normal, 0.02), ready to train;
    without `initialize` the weights are whatever was in memory, and `load_model` fills them from a
    checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        initialize: bool = True,
        shard: Shard | None = None,
        group: TensorParallelGroup | None = None,
    ) -> None:
        """`config` describes the whole model, `shard` the part to make (None: all), `group` the
        ranks of its stage."""
        super().__init__()
        self.model_config = config  # the whole model's
        # The sizes of this decoder. Without a shard it is the same object as the model's config: a
        # compiler treats the sizes in a decoder's own config as constants.
        if shard is None:
            shard = whole_model(config)
        else:
            config = shard_config(config, shard)
        self.config = config
        # Only the first stage has an `embedding`, only the last one a `final_norm` and a `lm_head`.
        # `layers` holds the stage's layers, counted from 0.
        self.shard = shard
        self.writes_free_canvases = config.writes_free_canvases
        self.is_first = shard.is_first
        self.is_last = shard.is_last
        if group is None:
            if shard.degree > 1:
                raise ValueError("ranks that compute a stage together need a group")
            group = SINGLE_RANK
        self.group = group
        rows = divided(config.vocab_size, shard.degree)
        if self.is_first:
            self.embedding = VocabParallelEmbedding(
                rows, config.hidden_size, first_row=shard.rank * rows
            )
            if config.embedding.per_layer_size:
                self.per_layer_embeddings = PerLayerEmbeddings(config, rows, shard.rank * rows)
            if self.writes_free_canvases:
                self.self_conditioning = SelfConditioning(config)
        self.rotary = nn.ModuleList(RotaryEmbedding(rope) for rope in config.rope_kinds)
        self.layers = nn.ModuleList(
            layer_type(config, index)(config, index, group) for index in range(config.num_layers)
        )
        if self.is_last:
            self.final_norm = RMSNorm(config.hidden_size, config.norms.eps, config.norms.kind)
            self.lm_head = Linear(config.hidden_size, rows, bias=False)
        self.rotary.to(self.device)
        if initialize:
            self.apply(_initialize)
        if config.tie_word_embeddings and self.is_first and self.is_last:
            self.lm_head.weight = self.embedding.weight

    def set_group(self, group: TensorParallelGroup | None) -> None:
        """Set the group of ranks to compute with; None between two groups, while nothing is
        computed."""
        if group is None:
            group = SINGLE_RANK
        self.group = group
        for layer in cast(Iterable[DecoderLayer], self.layers):
            layer.group = group

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights, hidden states and cache."""
        parameters = self.layers[0].parameters()
        return next(parameter.dtype for parameter in parameters if parameter.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        run_layer: LayerFunction = DecoderLayer.__call__,
        canvas: CanvasInputs | None = None,
    ) -> Tensor:
        """inputs -> hidden states [T, hidden_size], after the final norm in the last stage.

        The inputs of the first stage are token ids, int64 [T]; those of a later stage are the
        intermediate hidden states that the stage before it returned, [T, hidden_size]. Positions
        are int64 [T]. The T tokens may belong to any number of sequences: only `attention` knows
        which. `canvas` says which tokens belong to free canvases, if some do.
        """
        hidden, angles = self.embed(inputs, positions, canvas)
        per_layer_inputs = None
        if self.config.embedding.per_layer_size:
            embedded = self._look_up(self.per_layer_embeddings.embedding, inputs)
            per_layer_inputs = self.per_layer_embeddings(embedded, hidden)
        for layer in cast(Iterable[DecoderLayer], self.layers):
            cos, sin = angles[layer.rope]
            hidden = run_layer(layer, hidden, cos, sin, attention)
            if per_layer_inputs is not None:
                hidden = layer.add_per_layer_input(hidden, per_layer_inputs[:, layer.index])
            if self.writes_free_canvases:
                hidden = layer.scale_output(hidden, canvas)
        return self.apply_final_norm(hidden)

    def embed(
        self, inputs: Tensor, positions: Tensor, canvas: CanvasInputs | None = None
    ) -> tuple[Tensor, list[Angles]]:
        """Embed tokens (first stage only), and compute the cos and sin of each kind of RoPE. The
        arguments are those of `forward`; each layer takes the angles of its `rope`."""
        hidden = inputs
        if self.is_first:
            hidden = self._embed_tokens(inputs)
            if canvas is not None:
                conditioned = self.self_conditioning(hidden[canvas.places], canvas.soft_embeddings)
                hidden = hidden.index_copy(0, canvas.places, conditioned)
        return hidden, self.angles(positions, hidden.dtype)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles]:
        """The cosines and sines of positions [T] for each kind of rope, as RotaryEmbedding has
        them."""
        return [rotary(positions, dtype) for rotary in self.rotary]

    def apply_final_norm(self, hidden: Tensor) -> Tensor:
        """Normalize the output of the last layer (last stage only); other stages return it
        unchanged."""
        if not self.is_last:
            return hidden
        normed: Tensor = self.final_norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> logits, float32 [N, vocab_size], in the last stage. All ranks
        of the group must call this; only the first one gets logits, the others [0, vocab_size]."""
        return self.compute_sampled_logits(hidden).float()

    def compute_sampled_logits(self, hidden: Tensor) -> Tensor:
        """Compute the numbers of `compute_logits`. They have the decoder's dtype if the last
        product rounds them to it: sampling needs no more, and 16 bits take half the memory."""
        config = self.config
        gathered = self.group.gather(self.lm_head(hidden))
        if gathered is None:
            return hidden.new_empty(0, config.vocab_size, dtype=torch.float32)
        logits = gathered[:, : config.vocab_size]
        scale, cap = config.logits.scale, config.logits.soft_cap
        if scale != 1.0:
            logits = logits.float() * scale
        if cap:
            logits = (logits.float() / cap).tanh() * cap
        return logits

    def greediest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [N, hidden_size] -> the largest logit, float32 [N], and the lowest token that has
        it, int64 [N], in the last stage. Like `compute_logits`, but each rank sends two numbers a
        row; the others get [0]."""
        logits = self.lm_head(hidden).float()
        first = self.shard.rank * logits.shape[1]
        # the last rank's other tokens are padding
        num_real = max(0, self.config.vocab_size - first)
        logits[:, num_real:] = -torch.inf
        maxima, tokens = logits.max(dim=1)
        own = torch.stack((maxima.double(), tokens.double() + first), dim=1)
        gathered = self.group.gather(own)
        if gathered is None:
            return hidden.new_empty(0, dtype=torch.float32), tokens[:0]
        # of equal ones the first, which has the lowest tokens
        maxima, best_ranks = gathered[:, 0::2].max(dim=1)
        best_tokens = gathered[:, 1::2].gather(1, best_ranks[:, None])
        return maxima.float(), best_tokens[:, 0].long()

    def soft_embeddings(self, logits: Tensor) -> Tensor:
        """Processed logits of a canvas's tokens, float32 [N, vocab_size] -> the embeddings that
        they expect, [N, hidden_size]: the mean of all tokens' embeddings, weighted by the softmax.
        For models with free canvases, which one device computes."""
        maxima = logits.amax(dim=-1, keepdim=True)
        shape = (len(logits), self.config.hidden_size)
        added = torch.zeros(shape, dtype=torch.float32, device=logits.device)
        weight_sums = torch.zeros_like(maxima)
        for first in range(0, logits.shape[1], _VOCABULARY_PIECE):
            weights = (logits[:, first : first + _VOCABULARY_PIECE] - maxima).exp()
            weight_sums += weights.sum(dim=-1, keepdim=True)
            rows = self.embedding.rows(first, first + weights.shape[1])
            added += (weights.to(rows.dtype) @ rows).float()
        mean = (added / weight_sums).to(self.dtype)
        return self._scale_embedded(mean)

    def _embed_tokens(self, token_ids: Tensor) -> Tensor:
        return self._scale_embedded(self._look_up(self.embedding, token_ids))

    def _scale_embedded(self, hidden: Tensor) -> Tensor:
        scale = self.config.embedding.scale
        if scale == 1.0:
            return hidden
        rounded = torch.tensor(scale, dtype=hidden.dtype)  # as models are trained with it
        return hidden * rounded.item()

    def _look_up(self, table: VocabularyShard, token_ids: Tensor) -> Tensor:
        if self.shard.degree == 1:
            found: Tensor = table(token_ids)
            return found
        return self.group.all_reduce(table.known(token_ids))


def layer_type(config: ModelConfig, index: int) -> type[DecoderLayer]:
    """The class of a layer."""
    if not config.is_recurrent(index):
        return DecoderLayer
    from nanoserve.models.recurrent import RecurrentLayer  # for models that have such layers

    return RecurrentLayer


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_STANDARD_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    kernel = getattr(module, "kernel", None)
    if isinstance(kernel, nn.Parameter):  # of a mixer (models/recurrent.py)
        nn.init.normal_(kernel, std=INITIAL_STANDARD_DEVIATION)
    if isinstance(module, MixtureOfExperts):
        nn.init.normal_(module.gate_up, std=INITIAL_STANDARD_DEVIATION)
        nn.init.normal_(module.down, std=INITIAL_STANDARD_DEVIATION)


# ---- frequencies of rotary embedding, stretched as long-context checkpoints ask


def _inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [rotary_dim // 2] on the CPU."""
    dimensions = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu")
    exponents = dimensions / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(
            rope.frequency_factors, dtype=torch.float32, device="cpu"
        )
    if rope.kind == "none":
        return torch.zeros_like(frequencies)
    if rope.kind == "proportional":
        num_turning = int(rope.proportion * rope.rotary_dim // 2)
        is_still = torch.arange(len(frequencies), device="cpu") >= num_turning
        return frequencies.masked_fill(is_still, 0.0) / rope.factor
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: frequencies of long wavelengths are divided by the factor, short ones kept, others
    blended."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope.factor


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN, section 3.2: dimensions with more than beta_fast turns in the trained context are kept,
    those with fewer than beta_slow turns are interpolated, with a linear ramp over the dimension's
    index between them."""
    low = _dimension(rope.beta_fast, rope)
    high = _dimension(rope.beta_slow, rope)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.rotary_dim - 1)
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    span = max(high - low, 0.001)
    interpolated = ((index - low) / span).clamp(0.0, 1.0)
    return interpolated * frequencies / rope.factor + (1.0 - interpolated) * frequencies


def _dimension(turns: float, rope: RopeConfig) -> float:
    """The (fractional) index of the frequency that turns this often within the trained context."""
    wavelength_ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(wavelength_ratio) / (2 * math.log(rope.theta))


def _attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature on the attention logits, folded into the cosines and sines."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    if factor <= 1:
        return 1.0
    return 0.1 * scale * math.log(factor) + 1.0
