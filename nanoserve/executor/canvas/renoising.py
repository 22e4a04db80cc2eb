"""Renoising: how a canvas of random tokens becomes text. Each denoising step samples a token at
every position, accepts some of them, and puts new random tokens at all others."""

from collections.abc import Sequence

import numpy as np

from nanoserve.config.model_parts import RenoisingConfig
from nanoserve.executor.canvas.samplers import STEP_STRIDE, EntropyBound
from nanoserve.executor.sampling.sampler import SamplingState

_RANDOM_TOKENS = 1 << 62
"""Where the counter of random tokens begins, behind that of samples."""


def random_tokens(
    state: SamplingState, first: int, length: int, step: int, vocab_size: int
) -> np.ndarray:
    """Draw the tokens that a denoising step finds in a canvas where none is accepted, int64
    [length], each of the vocabulary with equal probability. The canvas begins at position `first`
    of the sequence; steps are counted from 0. Each token is a function of seed, sample, position
    and step alone."""
    positions = _RANDOM_TOKENS + step * STEP_STRIDE + first + np.arange(length, dtype=np.int64)
    words = state.keys(positions).view(np.uint32).astype(np.uint64)
    numbers = words[:, 0] | words[:, 1] << np.uint64(32)
    return (numbers % np.uint64(vocab_size)).astype(np.int64)


class Renoising:
    """The entropy-bound sampler of DiffusionGemma with its schedule of temperatures, and the rule
    by which a canvas is final (transformers' generation_diffusion_gemma.py)."""

    def __init__(self, config: RenoisingConfig) -> None:
        self.config = config
        self._bound = EntropyBound(config.entropy_bound)

    def temperature(self, step: int) -> float:
        """The temperature of a step, counted from 0. It falls from t_max, and does not reach
        t_min."""
        config = self.config
        left = (config.max_denoising_steps - step) / config.max_denoising_steps
        return config.t_min + (config.t_max - config.t_min) * left

    def accepted(self, entropies: np.ndarray) -> np.ndarray:
        """Return the places of a canvas whose sampled tokens stay, from the entropy at each
        place."""
        return self._bound.settle(entropies, 0, len(entropies))

    def is_final(
        self,
        step: int,
        entropies: np.ndarray,
        likeliest: np.ndarray,
        earlier: Sequence[np.ndarray],
    ) -> bool:
        """Return whether the likeliest tokens of a step are the answer: after the last step, or if
        they were the same in the steps before, and the mean entropy is small. `earlier` are the
        likeliest tokens of the canvas's steps before, the latest last."""
        config = self.config
        if step + 1 >= config.max_denoising_steps:
            return True
        threshold = config.stability_threshold
        if len(earlier) < threshold:
            return False
        latest = earlier[len(earlier) - threshold :]
        is_stable = all(np.array_equal(likeliest, each) for each in latest)
        return is_stable and bool(entropies.mean() < config.confidence_threshold)
