"""Random numbers without a generator: each is a hash of what it is for (seed, sample index, position, token id).

The same request therefore draws the same numbers on every device, in every batch, at every place in it, and again after
a preemption. Everything is integer tensor arithmetic that wraps around; `>>` keeps the sign, hence the masks.
"""

import torch
from torch import Tensor

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MIX32_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_BELOW_ONE = 1.0 - 2.0**-24


def row_keys(seed: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """Hash int64 [R] seeds, sample indices and positions into two words per row: int32 [R, 2]."""
    key = _mix64(seed + _signed(_GOLDEN_RATIO, 64))
    key = _mix64(key ^ index)
    key = _mix64(key + position * _signed(_GOLDEN_RATIO, 64))
    return torch.stack((key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF), dim=1).to(torch.int32)


def exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponentially distributed numbers of rate 1, float32 [R, K], for keys [R, 2] and token ids [R, K] or [1, K].

    Small ones are exact to a relative 2^-24 down to 2^-33: in a race it is the small ones that win, and a coarser grid
    would never draw the unlikely tokens of a large vocabulary.
    """
    hashed = _mix32(_mix32(tokens.to(torch.int32) ^ keys[:, :1]) ^ keys[:, 1:])
    high = ((hashed >> 16) & 0xFFFF).float()
    low = (hashed & 0xFFFF).float()
    uniform = (high * 2.0**-16 + (low + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def _mix64(value: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ _shift_right(value, 30, 64)) * _signed(_SPLITMIX_MULTIPLIERS[0], 64)
    value = (value ^ _shift_right(value, 27, 64)) * _signed(_SPLITMIX_MULTIPLIERS[1], 64)
    return value ^ _shift_right(value, 31, 64)


def _mix32(value: Tensor) -> Tensor:
    """A 32-bit bijection in which every input bit moves every output bit (xor-shift-multiply; Wellons 2018)."""
    value = (value ^ _shift_right(value, 16, 32)) * _signed(_MIX32_MULTIPLIERS[0], 32)
    value = (value ^ _shift_right(value, 15, 32)) * _signed(_MIX32_MULTIPLIERS[1], 32)
    return value ^ _shift_right(value, 16, 32)


def _shift_right(value: Tensor, count: int, width: int) -> Tensor:
    return (value >> count) & ((1 << (width - count)) - 1)


def _signed(value: int, width: int) -> int:
    """The two's complement integer with these bits, as a tensor of that width takes it."""
    return value - (1 << width) if value >> (width - 1) else value
