"""The decoder: every supported family is this code with other fields in its ModelConfig.

A layer is two pieces with attention between them. Attention is a callable that is passed in, so the same layers train,
serve from a paged cache, or hand attention to another device. A decoder may be one shard of a model: some of the
layers, and in each layer some of the heads and part of the inner size. A layer knows only its own sizes and its group.
"""

import math
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config import ModelConfig, MoeConfig, RopeConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.shards import Shard, divided, shard_config, whole_model
from triton_ops import project, sparse_experts

INITIAL_STANDARD_DEVIATION = 0.02


class TensorParallelGroup(Protocol):
    """The ranks that compute one stage together. All of them call the same methods in the same order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on every rank. May reuse its argument."""

    def gather(self, tensor: Tensor) -> Tensor | None:
        """[N, C] of every rank -> [N, degree * C] on rank 0, side by side in the order of ranks; None elsewhere."""


class SingleRank:
    """A TensorParallelGroup with one rank: its tensors are the results."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor | None:
        return tensor


SINGLE_RANK = SingleRank()


class Linear(nn.Linear):
    """torch's layer, computed by `project`. Its first weights are not set: a Decoder draws its own, if any."""

    def reset_parameters(self) -> None:
        """Leave the weights to the code that makes the layer."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias)


class VocabularyPart(nn.Module):
    """The embedding of a vocabulary, or of the part of it that begins at `first_row`."""

    num_embeddings: int
    first_row: int

    def known(self, token_ids: Tensor) -> Tensor:
        """token_ids [T], of the whole vocabulary -> [T, embedding_dim]; zeros for tokens that other parts hold."""
        rows = token_ids - self.first_row
        unknown = (rows < 0) | (rows >= self.num_embeddings)
        found: Tensor = self(rows.masked_fill(unknown, 0))
        return found.masked_fill(unknown[:, None], 0.0)


class VocabularyEmbedding(nn.Embedding, VocabularyPart):
    """torch's layer. Its first weights are not set."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, first_row: int = 0) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.first_row = first_row

    def reset_parameters(self) -> None:
        """Leave the weights to the code that makes the layer."""


class RotaryEmbedding(nn.Module):
    """The cosines and sines that rotate queries and keys to their positions (arXiv 2104.09864).

    The frequencies are made on the CPU in float32, whatever the default device and dtype are, so that a model in
    bf16 still rotates by exact angles. Cast a model by loading it in that dtype, not with `.to(dtype)`.
    """

    inverse_frequencies: Tensor

    def __init__(self, rope: RopeConfig) -> None:
        super().__init__()
        self.attention_factor = _attention_factor(rope)
        self.register_buffer("inverse_frequencies", _inverse_frequencies(rope), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cosines and sines, float32 [T, 1, rotary_dim // 2] (the 1 spreads over heads)."""
        angles = (positions.float()[:, None] * self.inverse_frequencies)[:, None, :]
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor


def rotate(heads: Tensor, cos: Tensor, sin: Tensor, rope: RopeConfig) -> Tensor:
    """Rotate the first `rotary_dim` dimensions of heads [T, H, head_dim] by the angles of their positions."""
    turning = heads[..., : rope.rotary_dim]
    if rope.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if rope.rotary_dim == heads.shape[-1]:
        return turned
    return torch.cat((turned, heads[..., rope.rotary_dim :]), dim=-1)


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        exact = hidden.float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        output: Tensor = self.down(functional.silu(gate) * up)
        return output


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
        weights, experts = route(self.router(hidden), self.moe)
        return sparse_experts(hidden, weights, experts, self.gate_up, self.down)


def route(scores: Tensor, moe: MoeConfig) -> tuple[Tensor, Tensor]:
    """scores [T, num_experts] -> weights, float32 [T, experts_per_token], and the experts they belong to, int64, same
    shape."""
    probabilities = functional.softmax(scores, dim=-1, dtype=torch.float32)
    weights, experts = probabilities.topk(moe.experts_per_token, dim=-1)
    if moe.normalize_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


class DecoderLayer(nn.Module):
    """One transformer layer, split where attention happens.

    `config` has the sizes of this rank. Each rank's results of `output` and of the feed-forward part are summed over
    the group. One rank adds the biases; they are zero on the others.
    """

    def __init__(self, config: ModelConfig, index: int, group: TensorParallelGroup = SINGLE_RANK) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.group = group
        self.query_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.qkv = Linear(config.hidden_size, self.query_size + 2 * self.kv_size, bias=config.qkv_bias)
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.key_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.output = Linear(self.query_size, config.hidden_size, bias=config.output_bias)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feed_forward: nn.Module
        if config.moe is not None and config.is_sparse(index):
            self.feed_forward = SparseExperts(config.hidden_size, config.moe)
        else:
            self.feed_forward = FeedForward(config)
        if config.norms_per_layer == 4:
            self.attention_output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.feed_forward_output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def pre_attention(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden_size] -> query [T, num_heads, head_dim], key, value [T, num_kv_heads, head_dim]; query and
        key are rotated to the positions of cos and sin."""
        config = self.config
        query, key, value = self.qkv(self.attention_norm(hidden)).split(
            (self.query_size, self.kv_size, self.kv_size), dim=-1
        )
        query = query.view(-1, config.num_heads, config.head_dim)
        key = key.view(-1, config.num_kv_heads, config.head_dim)
        value = value.view(-1, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, cos, sin, config.rope), rotate(key, cos, sin, config.rope), value

    def post_attention(self, attention_output: Tensor, residual: Tensor) -> Tensor:
        """attention_output [T, num_heads * head_dim] and residual [T, hidden_size] -> [T, hidden_size]"""
        four_norms = self.config.norms_per_layer == 4
        attended = self.group.all_reduce(self.output(attention_output))
        residual = residual + (self.attention_output_norm(attended) if four_norms else attended)
        fed = self.group.all_reduce(self.feed_forward(self.feed_forward_norm(residual)))
        return residual + (self.feed_forward_output_norm(fed) if four_norms else fed)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction) -> Tensor:
        query, key, value = self.pre_attention(hidden, cos, sin)
        return self.post_attention(attention(self.index, query, key, value), hidden)


LayerFunction = Callable[[DecoderLayer, Tensor, Tensor, Tensor, AttentionFunction], Tensor]
"""Runs one layer on hidden states, cosines, sines and an attention function: eagerly, or compiled."""


class Decoder(nn.Module):
    """Token ids in, hidden states out; logits only for the positions that are asked for.

    Built on torch's default device and dtype with random weights (normal, 0.02), ready to train; without
    `initialize` the weights are whatever was in memory, and `load_model` fills them from a checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        initialize: bool = True,
        shard: Shard | None = None,
        group: TensorParallelGroup | None = None,
    ) -> None:
        """`config` describes the whole model, `shard` the part to make (None: all), `group` the ranks of its stage."""
        super().__init__()
        self.model_config = config  # the whole model's
        # Only the first stage has an `embedding`, only the last one a `final_norm` and a `lm_head`. `layers` holds the
        # stage's layers, counted from 0.
        self.shard = shard or whole_model(config)
        self.is_first, self.is_last = self.shard.is_first, self.shard.is_last
        if self.shard.degree > 1 and group is None:
            raise ValueError("ranks that compute a stage together need a group")
        self.group = group or SINGLE_RANK
        # The sizes of this decoder. Without a shard it is the same object as the model's config: a compiler treats the
        # sizes in a decoder's own config as constants.
        self.config = config = config if shard is None else shard_config(config, shard)
        rows = divided(config.vocab_size, self.shard.degree)
        if self.is_first:
            self.embedding = VocabularyEmbedding(rows, config.hidden_size, first_row=self.shard.rank * rows)
        self.rotary = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, index, self.group) for index in range(config.num_layers))
        if self.is_last:
            self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, rows, bias=False)
        self.rotary.to(self.device)
        if initialize:
            self.apply(_initialize)
        if config.tie_word_embeddings and self.is_first and self.is_last:
            self.lm_head.weight = self.embedding.weight

    def meet(self, group: TensorParallelGroup | None) -> None:
        """Compute with these ranks from now on; None between two groups, while nothing is computed."""
        for part in (self, *self.layers):
            part.group = group or SINGLE_RANK

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights, hidden states and cache."""
        return cast(DecoderLayer, self.layers[0]).attention_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        entering: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        run_layer: LayerFunction = DecoderLayer.__call__,
    ) -> Tensor:
        """entering -> hidden states [T, hidden_size], after the final norm in the last stage.

        The first stage is given token ids, int64 [T]; a later one the hidden states of the stage before it,
        [T, hidden_size]. Positions are int64 [T]. The T tokens may belong to any number of sequences: only `attention`
        knows which.
        """
        hidden, cos, sin = self.enter(entering, positions)
        for layer in cast(Iterable[DecoderLayer], self.layers):
            hidden = run_layer(layer, hidden, cos, sin, attention)
        return self.leave(hidden)

    def enter(self, entering: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the first layer, from the arguments of `forward`: hidden states, cosines and sines."""
        hidden = self._embed(entering) if self.is_first else entering
        cos, sin = self.rotary(positions)
        return hidden, cos.to(hidden.dtype), sin.to(hidden.dtype)

    def leave(self, hidden: Tensor) -> Tensor:
        """The output of the stage from that of its last layer: normalized in the last stage, else unchanged."""
        if not self.is_last:
            return hidden
        normed: Tensor = self.final_norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> logits, float32 [N, vocab_size], in the last stage. All ranks of the group must
        call this; only the first one gets logits, the others [0, vocab_size]."""
        vocab_size = self.config.vocab_size
        logits = self.group.gather(self.lm_head(hidden))
        if logits is None:
            return hidden.new_empty(0, vocab_size, dtype=torch.float32)
        return logits[:, :vocab_size].float()

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.shard.degree == 1:
            hidden: Tensor = self.embedding(token_ids)
            return hidden
        return self.group.all_reduce(self.embedding.known(token_ids))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_STANDARD_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, SparseExperts):
        nn.init.normal_(module.gate_up, std=INITIAL_STANDARD_DEVIATION)
        nn.init.normal_(module.down, std=INITIAL_STANDARD_DEVIATION)


# ---- frequencies of rotary embedding, stretched as long-context checkpoints ask


def _inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [rotary_dim // 2] on the CPU."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu") / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.frequency_factors:
        frequencies = frequencies / torch.tensor(rope.frequency_factors, dtype=torch.float32, device="cpu")
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    if rope.kind == "yarn":
        return _yarn(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: frequencies of long wavelengths are divided by the factor, short ones kept, others blended."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / rope.factor


def _yarn(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN, section 3.2: dimensions with more than beta_fast turns in the trained context are kept, those with fewer
    than beta_slow turns are interpolated, with a linear ramp over the dimension's index between them."""
    low, high = _dimension(rope.beta_fast, rope), _dimension(rope.beta_slow, rope)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    index = torch.arange(rope.rotary_dim // 2, dtype=torch.float32, device="cpu")
    interpolated = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
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
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
