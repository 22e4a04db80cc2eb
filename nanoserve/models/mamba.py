"""The mixers of Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060).

Keys, queries and values are what the papers call B, C and x: what a token adds to the state, what
it reads there, and the numbers that pass through it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.mixers import Mamba2Config, MambaConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.models.decoder import Linear, RMSNorm, TensorParallelGroup
from nanoserve.models.mixer import Mixer, RecurrentStates
from triton_ops import selective_scan, state_space_dual


class Mamba2(Mixer):
    """The mixer of Mamba-2: a short convolution over values, keys and queries, a state for each
    head, and a norm of the gated output. `recurrent` and `heads` have the sizes of this rank."""

    def __init__(
        self, config: ModelConfig, recurrent: RecurrentConfig, heads: Mamba2Config
    ) -> None:
        # rows of gates, values, keys, queries, and a step of each head
        super().__init__(config, recurrent)
        self.heads = heads
        self.log_decay = nn.Parameter(torch.zeros(heads.num_heads, dtype=torch.float32))
        """The logarithm of each head's rate of decay (A_log)."""
        self.step_bias = nn.Parameter(torch.zeros(heads.num_heads, dtype=torch.float32))
        """Is added to what the hidden state makes of a head's step (dt_bias)."""
        self.skip = nn.Parameter(torch.ones(heads.num_heads, dtype=torch.float32))
        """The factor of values that pass the state by (D)."""
        self.norm = RMSNorm(heads.inner_size, config.norms.eps)

    def forward(
        self, hidden: Tensor, states: RecurrentStates, group: TensorParallelGroup
    ) -> Tensor:
        assert states.matrix is not None, "its states have matrices"
        heads = self.heads
        gate, projected, step = torch.split(
            self.inputs(hidden), [heads.inner_size, heads.channels, heads.num_heads], dim=-1
        )
        convolved = self.convolve(projected, states, silu=True)
        value, key, query = torch.split(
            convolved, [heads.inner_size, heads.group_size, heads.group_size], dim=-1
        )
        of_groups = (heads.num_groups, heads.state_size)
        value = value.view(-1, heads.num_heads, heads.head_dim)
        time_step = functional.softplus(step.float() + self.step_bias)
        time_step = time_step.clamp(*heads.time_step_limits)
        decay = -self.log_decay.exp() * time_step
        output = value.new_empty(value.shape)
        state_space_dual(
            output,
            query.view(-1, *of_groups),
            key.view(-1, *of_groups),
            value,
            decay,
            time_step,
            states.matrix,
            states.segments,
        )
        passed = output.float() + self.skip[:, None] * value.float()
        gated = passed.flatten(1) * functional.silu(gate.float())
        return self._norm_groups(gated, group, hidden.dtype)

    def _norm_groups(self, gated: Tensor, group: TensorParallelGroup, dtype: torch.dtype) -> Tensor:
        """The norm over each group's outputs, float32 [T, inner_size], whatever ranks have them."""
        groups = self.heads.num_groups
        by_group = gated.view(-1, groups, self.heads.inner_size // groups)
        mean_square = by_group.square().mean(-1, keepdim=True)
        if self.heads.ranks_of_group > 1:
            mean_square = group.all_reduce(mean_square) / self.heads.ranks_of_group
        spread = mean_square.expand_as(by_group).flatten(1)
        return self.norm.scale(gated, spread, dtype)


class Mamba(Mixer):
    """The mixer of Mamba: a short convolution over values, and the selective scan, whose steps,
    keys and queries are made of what it returns. `recurrent` and `sizes` are those of this
    rank."""

    def __init__(self, config: ModelConfig, recurrent: RecurrentConfig, sizes: MambaConfig) -> None:
        # rows of values and of gates
        super().__init__(config, recurrent)
        self.sizes = sizes
        self.selection = Linear(sizes.channels, sum(sizes.selection_sizes), bias=False)
        self.time_step = Linear(sizes.time_step_rank, sizes.channels, bias=False)
        self.step_bias = nn.Parameter(torch.zeros(sizes.channels, dtype=torch.float32))
        """Is added to each channel's step."""
        self.log_decay = nn.Parameter(torch.zeros(sizes.matrix_shape, dtype=torch.float32))
        """The logarithm of the rate at which each number decays (A_log)."""
        self.skip = nn.Parameter(torch.ones(sizes.channels, dtype=torch.float32))
        """The factor of values that pass the state by (D)."""
        if sizes.has_norms:
            eps = config.norms.eps
            self.norms = nn.ModuleList(RMSNorm(size, eps) for size in sizes.selection_sizes)

    def forward(
        self, hidden: Tensor, states: RecurrentStates, group: TensorParallelGroup
    ) -> Tensor:
        assert states.matrix is not None, "its states have matrices"
        projected, gate = self.inputs(hidden).chunk(2, dim=-1)
        value = self.convolve(projected, states, silu=True)
        selection = group.all_reduce(self.selection(value))
        step, key, query = torch.split(selection, [*self.sizes.selection_sizes], dim=-1)
        if self.sizes.has_norms:
            step_norm, key_norm, query_norm = self.norms
            step, key, query = step_norm(step), key_norm(key), query_norm(query)
        time_step = functional.softplus(self.time_step(step).float() + self.step_bias)
        output = torch.empty_like(value)
        selective_scan(
            output,
            query,
            key,
            value,
            time_step,
            -self.log_decay.exp(),
            states.matrix,
            states.segments,
        )
        passed = output.float() + self.skip * value.float()
        gated = passed * functional.silu(gate.float())
        return gated.to(hidden.dtype)
