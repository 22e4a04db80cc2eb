"""The decoder: every supported family is this code with other fields in its ModelConfig.

A layer is two pieces with attention between them. Attention is a callable passed in, so the same layers train,
serve from a paged cache, or hand attention to another device. A decoder may be one shard of a model: some of the
layers, and of each some of the heads and of the inner size. A layer knows that from its config and its group alone.
"""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.experts import SparseExperts
from nanoserve.models.linear import Linear, VocabularyEmbedding
from nanoserve.models.rotary import RotaryEmbedding, rotate
from nanoserve.models.shards import Shard, SingleRank, TensorParallelGroup, divided, shard_config, whole_model

INITIAL_STANDARD_DEVIATION = 0.02
_SINGLE_RANK = SingleRank()


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


class DecoderLayer(nn.Module):
    """One transformer layer, split where attention happens.

    `config` has the sizes of this rank. What the ranks of its group compute in `output` and in the feed-forward part
    are addends of the whole layer's; their biases are one rank's, and zero on the others.
    """

    def __init__(self, config: ModelConfig, index: int, group: TensorParallelGroup = _SINGLE_RANK) -> None:
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
        """hidden [T, hidden_size] -> query [T, num_heads, head_dim], key, value [T, num_kv_heads, head_dim].

        Query and key are rotated to the positions of cos and sin.
        """
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
        """config: of the whole model, of which `shard` (None: all of it) is made; `group`: of the shard's ranks."""
        super().__init__()
        self.model_config = config  # of the whole model
        # Which part of the model this is. Only the first stage has an `embedding`, only the last one a `final_norm` and
        # a `lm_head`; `layers` are the stage's, counted from 0.
        self.shard = shard or whole_model(config)
        if self.shard.degree > 1 and group is None:
            raise ValueError("ranks that compute a stage together need a group")
        self.group = group or _SINGLE_RANK
        # Without a shard the same object: a compiler takes the sizes in a decoder's own config for fixed.
        # of this decoder: the model's, or that of its shard.
        self.config = config = config if shard is None else shard_config(config, shard)
        rows = divided(config.vocab_size, self.shard.degree)
        if self.shard.is_first:
            self.embedding = VocabularyEmbedding(rows, config.hidden_size, first_row=self.shard.rank * rows)
        self.rotary = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(DecoderLayer(config, index, self.group) for index in range(config.num_layers))
        if self.shard.is_last:
            self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = Linear(config.hidden_size, rows, bias=False)
        self.rotary.to(self.device)
        if initialize:
            self.apply(_initialize)
        if config.tie_word_embeddings and self.shard.is_first and self.shard.is_last:
            self.lm_head.weight = self.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and cache."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.parameters()).device

    def forward(
        self,
        entering: Tensor,
        positions: Tensor,
        attention: AttentionFunction,
        run_layer: LayerFunction = DecoderLayer.__call__,
    ) -> Tensor:
        """entering -> hidden states [T, hidden_size], after the final norm in the last stage.

        What enters the first stage are token ids, int64 [T], and later ones the hidden states of the stage before,
        [T, hidden_size]; positions: int64 [T]. The T tokens may belong to any number of sequences: only `attention`
        knows which.
        """
        hidden, cos, sin = self.enter(entering, positions)
        for layer in cast(Iterable[DecoderLayer], self.layers):
            hidden = run_layer(layer, hidden, cos, sin, attention)
        return self.leave(hidden)

    def enter(self, entering: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What comes before the layers, arguments as in `forward`: hidden states [T, hidden_size], and the positions'
        cosines and sines as a layer takes them."""
        hidden = self._embed(entering) if self.shard.is_first else entering
        cos, sin = self.rotary(positions)
        return hidden, cos.to(hidden.dtype), sin.to(hidden.dtype)

    def leave(self, hidden: Tensor) -> Tensor:
        """What is behind the layers: the final norm in the last stage, and nothing in the others."""
        if not self.shard.is_last:
            return hidden
        normed: Tensor = self.final_norm(hidden)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, hidden_size] -> logits, float32 [N, vocab_size], in the last stage.

        All ranks of its group must call this; those but the first get none: [0, vocab_size].
        """
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
