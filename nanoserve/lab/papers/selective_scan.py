"""Mamba's mixer with its selective scan (arXiv 2312.00752), in a form that trains.

A state is a matrix of numbers, and as in S4D (s4d.py) it decays and takes the input in. But the
step of time, B and C are made of the input, position by position:

    h_t = exp(step_t A) h_(t-1) + step_t u_t B_t,    y_t = h_t C_t + D u_t.

A large step takes the input in and forgets what was there, a small one leaves the state as it is:
this is the selection. No kernel can be computed once for all inputs, so this is no convolution.
With one A for all numbers of a head, as in Mamba-2 (arXiv 2405.21060), it is still computed for all
positions at once: unrolled, y_t is the sum over all s up to t of

    exp(step_(s+1) A + ... + step_t A) (C_t . B_s) step_s u_s,

attention without a softmax, in which scores fade with time.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1
"""Steps of time of the heads before training, as Mamba draws them."""


def selective_scan(
    inputs: Tensor, steps: Tensor, decays: Tensor, taking: Tensor, reading: Tensor
) -> Tensor:
    """u [batch, length, heads, size], steps [batch, length, heads], A [heads], below 0, and B and C
    [batch, length, N], which heads share -> outputs without those of the skip D, [batch, length,
    heads, size]. Sequences are short: the scores of all pairs of positions are in memory."""
    exponents = (steps * decays).cumsum(1).transpose(1, 2)  # [batch, heads, length]
    faded = exponents[..., :, None] - exponents[..., None, :]
    is_later = torch.ones(faded.shape[-2:], dtype=torch.bool).triu(1)
    kept = faded.masked_fill(is_later, -torch.inf).exp()
    scores = kept * (reading @ taking.transpose(1, 2))[:, None]
    arriving = (steps[..., None] * inputs).transpose(1, 2)
    return (scores @ arriving).transpose(1, 2)


class TrainableMamba(nn.Module):
    """The mixer of Mamba: a short causal convolution, the selective scan, and a gate. Steps and
    decays begin as in the papers."""

    def __init__(
        self, width: int, *, channels: int, heads: int, state_size: int, kernel_size: int = 4
    ) -> None:
        super().__init__()
        self.heads, self.state_size = heads, state_size
        self.inward = nn.Linear(width, 2 * channels, bias=False)
        self.taps = nn.Parameter((2 * torch.rand(kernel_size, channels) - 1) * kernel_size**-0.5)
        self.selection = nn.Linear(channels, heads + 2 * state_size, bias=False)
        self.log_decay = nn.Parameter(torch.arange(1.0, heads + 1).log())
        drawn = torch.rand(heads) * math.log(LONGEST_STEP / SHORTEST_STEP)
        first_steps = (drawn + math.log(SHORTEST_STEP)).exp()
        self.step_bias = nn.Parameter(first_steps.expm1().log())  # the inverse of softplus
        self.skip = nn.Parameter(torch.ones(channels))
        self.outward = nn.Linear(channels, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [batch, length, width] -> same shape"""
        inputs, gate = self.inward(hidden).chunk(2, dim=-1)
        inputs = functional.silu(self._convolve(inputs))
        steps, taking, reading = self.selection(inputs).split(
            (self.heads, self.state_size, self.state_size), dim=-1
        )
        scanned = selective_scan(
            inputs.view(*inputs.shape[:2], self.heads, -1),
            functional.softplus(steps + self.step_bias),
            -self.log_decay.exp(),
            taking,
            reading,
        )
        outputs = (scanned.flatten(-2) + self.skip * inputs) * functional.silu(gate)
        mixed: Tensor = self.outward(outputs)
        return mixed

    def _convolve(self, inputs: Tensor) -> Tensor:
        """Each channel is a sum of its last inputs, times a number each."""
        length, before = inputs.shape[1], len(self.taps) - 1
        padded = functional.pad(inputs, (0, 0, before, 0))
        found = self.taps[0] * padded[:, :length]
        for tap in range(1, before + 1):
            found = found + self.taps[tap] * padded[:, tap : tap + length]
        return found
