"""Frequencies of rotary position embedding (arXiv 2104.09864), stretched as long-context checkpoints ask."""

import math

import torch
from torch import Tensor

from nanoserve.config import RopeConfig


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [rotary_dim // 2] on the CPU."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device="cpu") / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
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
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
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


def attention_factor(rope: RopeConfig) -> float:
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
