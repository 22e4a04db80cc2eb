"""Gated DeltaNet (arXiv 2412.06464) as Qwen3-Next and Qwen3.5 have it: linear attention whose state
is corrected by the delta rule and decays."""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import GatedDeltaNetConfig, RecurrentConfig
from nanoserve.models.decoder import Linear, RMSNorm
from triton_ops import causal_convolution, gated_delta_rule

if TYPE_CHECKING:  # it imports this module
    from nanoserve.models.recurrent import RecurrentStates


class GatedDeltaNet(nn.Module):
    """The mixer of a layer: a short convolution over queries, keys and values, the gated delta
    rule, and a norm of each head's output times a gate. `recurrent` and `heads` have the sizes of
    this rank."""

    def __init__(
        self, config: ModelConfig, recurrent: RecurrentConfig, heads: GatedDeltaNetConfig
    ) -> None:
        super().__init__()
        self.heads = heads
        self.output_size = heads.value_size
        num_heads = heads.num_value_heads
        # rows of queries, keys, values, and gates of the output
        self.inputs = Linear(config.hidden_size, heads.channels + heads.value_size, bias=False)
        self.rates = Linear(config.hidden_size, 2 * num_heads, bias=False)
        self.kernel = nn.Parameter(torch.empty(recurrent.channels, recurrent.kernel_size))
        self.log_decay = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))
        """The logarithm of each value head's rate of decay (A_log)."""
        self.step_bias = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))
        """Is added to what the hidden state makes of that rate (dt_bias)."""
        self.norm = RMSNorm(heads.value_head_dim, config.norms.eps)

    def forward(self, hidden: Tensor, states: "RecurrentStates") -> Tensor:
        """Normed hidden states [T, hidden_size] -> [T, output_size]"""
        assert states.matrix is not None, "its states have matrices"
        heads = self.heads
        projected, gate = self.inputs(hidden).split((heads.channels, heads.value_size), dim=-1)
        convolved = projected.new_empty(projected.shape)
        causal_convolution(
            convolved,
            projected,
            self.kernel,
            None,
            states.convolution,
            states.segments,
            silu=True,
        )
        query, key, value = convolved.split(
            (heads.key_size, heads.key_size, heads.value_size), dim=-1
        )
        of_values = (heads.num_value_heads, heads.value_head_dim)
        of_keys = (heads.num_key_heads, heads.key_head_dim)
        learning_rate, step = self.rates(hidden).float().chunk(2, dim=-1)
        decay = -self.log_decay.exp() * functional.softplus(step + self.step_bias)
        value = value.unflatten(-1, of_values)
        output = value.new_empty(value.shape)
        gated_delta_rule(
            output,
            query.unflatten(-1, of_keys),
            key.unflatten(-1, of_keys),
            value,
            decay,
            learning_rate.sigmoid(),
            states.matrix,
            states.segments,
        )
        opened = functional.silu(gate.unflatten(-1, of_values).float())
        gated = (self.norm(output) * opened).to(hidden.dtype)
        return cast(Tensor, gated.flatten(1))
