"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it: linear attention whose state
is corrected by the delta rule and decays."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.mixers import GatedDeltaNetConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.models.decoder import Linear, RMSNorm, TensorParallelGroup
from nanoserve.models.mixer import Mixer, RecurrentStates
from triton_ops import gated_delta_rule


class GatedDeltaNet(Mixer):
    """The mixer of a layer: a short convolution over queries, keys and values, the gated delta
    rule, and a norm of each head's output times a gate. `recurrent` and `heads` have the sizes of
    this rank."""

    def __init__(
        self, config: ModelConfig, recurrent: RecurrentConfig, heads: GatedDeltaNetConfig
    ) -> None:
        # rows of queries, keys, values, and gates of the output
        super().__init__(config, recurrent)
        self.heads = heads
        num_heads = heads.num_value_heads
        self.rates = Linear(config.hidden_size, 2 * num_heads, bias=False)
        self.log_decay = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))
        """The logarithm of each value head's rate of decay (A_log)."""
        self.step_bias = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))
        """Is added to what the hidden state makes of that rate (dt_bias)."""
        self.norm = RMSNorm(heads.value_head_dim, config.norms.eps)

    def forward(
        self, hidden: Tensor, states: RecurrentStates, _group: TensorParallelGroup
    ) -> Tensor:
        assert states.matrix is not None, "its states have matrices"
        heads = self.heads
        projected, gate = torch.split(
            self.inputs(hidden), [heads.channels, heads.value_size], dim=-1
        )
        convolved = self.convolve(projected, states, silu=True)
        query, key, value = torch.split(
            convolved, [heads.key_size, heads.key_size, heads.value_size], dim=-1
        )
        of_values = (heads.num_value_heads, heads.value_head_dim)
        of_keys = (heads.num_key_heads, heads.key_head_dim)
        learning_rate, step = self.rates(hidden).float().chunk(2, dim=-1)
        decay = -self.log_decay.exp() * functional.softplus(step + self.step_bias)
        value = value.view(-1, *of_values)
        output = value.new_empty(value.shape)
        gated_delta_rule(
            output,
            query.view(-1, *of_keys),
            key.view(-1, *of_keys),
            value,
            decay,
            learning_rate.sigmoid(),
            states.matrix,
            states.segments,
        )
        opened = functional.silu(gate.view(-1, *of_values).float())
        gated = (self.norm(output) * opened).to(hidden.dtype)
        return cast(Tensor, gated.flatten(1))
