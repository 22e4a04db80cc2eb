"""Canvas samplers: which positions of a canvas a denoising step settles.

A step draws a token at each position that is not settled, as the usual sampler draws it. A canvas
sampler measures the distributions from which they were drawn, and keeps some of the tokens. The
others are drawn again in the next step, from other distributions.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanoserve.engine_config import Denoising
from nanoserve.executor.sampling.sampler import SamplingRows
from nanoserve.executor.step.answers import rows_per_chunk
from triton_ops.sampling import keep_likely

STEP_STRIDE = 1 << 32
"""Positions that lie between two denoising steps in the counter of random numbers: each step draws
new ones."""


class CanvasSampler(Protocol):
    """Chooses among the M positions of a canvas that are not settled."""

    def measure(self, probabilities: "Probabilities") -> Tensor:
        """Measure each position, float32 [N], from the positions of all canvases of a step."""

    def settle(self, measured: np.ndarray, step: int, length: int) -> np.ndarray:
        """Return the places, of M, that are settled in a step, counted from 0, of a canvas of this
        length: at least one."""


class Confidence:
    """All tokens with more than `threshold` of the probability, but at least the step's share, the
    most probable ones (low_confidence_dynamic in SDAR's generate.py)."""

    def __init__(self, threshold: float, steps: int) -> None:
        self._threshold, self._steps = threshold, steps

    def measure(self, probabilities: "Probabilities") -> Tensor:
        return probabilities.of_tokens()

    def settle(self, measured: np.ndarray, step: int, length: int) -> np.ndarray:
        share = share_of_step(step, self._steps, length)
        sure = np.flatnonzero(measured > self._threshold)
        if len(sure) >= share:
            return sure
        return _largest(measured, share)


class Static:
    """Settles the step's share of the tokens, the most probable ones (low_confidence_static in
    SDAR's generate.py)."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def measure(self, probabilities: "Probabilities") -> Tensor:
        return probabilities.of_tokens()

    def settle(self, measured: np.ndarray, step: int, length: int) -> np.ndarray:
        return _largest(measured, share_of_step(step, self._steps, length))


class EntropyBound:
    """The positions of lowest entropy, while the sum of their entropies less the largest of them is
    at most the `bound` (arXiv 2505.24857). So much may their joint distribution differ from the
    product of theirs, of which the tokens are drawn."""

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def measure(self, probabilities: "Probabilities") -> Tensor:
        return probabilities.entropies()

    def settle(self, measured: np.ndarray, step: int, length: int) -> np.ndarray:
        order = np.argsort(measured, kind="stable")
        ascending = measured[order].astype(np.float64)
        before = np.cumsum(ascending) - ascending  # the largest so far is the last
        return order[: np.count_nonzero(before <= self._bound)]


def make_canvas_sampler(denoising: Denoising) -> CanvasSampler:
    """Make the sampler that the setting names."""
    settings = denoising.settings
    if denoising.strategy == "static":
        return Static(int(settings["steps"]))
    if denoising.strategy == "entropy":
        return EntropyBound(settings["bound"])
    return Confidence(settings["threshold"], int(settings["steps"]))


def share_of_step(step: int, steps: int, length: int) -> int:
    """Count the positions that a step has at least to settle in a canvas of this length: equal
    shares of `steps` steps, of which the first have one more where they do not come out even. 0
    steps stand for one for each position."""
    if not 0 < steps < length:
        steps = length
    share, rest = divmod(length, steps)
    if step < rest:
        share += 1
    return share


def _largest(measured: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest numbers, as far as there are so many; of equal ones the
    first."""
    return np.argsort(-measured, kind="stable")[:count]


class Probabilities:
    """The distributions of which the tokens of a step were drawn: what temperature, top_k, top_p
    and min_p leave, or the whole distribution where the likeliest token was taken."""

    def __init__(self, logits: Tensor, tokens: Tensor, rows: SamplingRows) -> None:
        """logits: float32 [N, V]; tokens: int64 [N], drawn from them as the rows say."""
        self._logits, self._tokens, self._rows = logits, tokens, rows

    def of_tokens(self) -> Tensor:
        """Return the probability of each token, float32 [N]."""
        found = self._logits.new_empty(len(self._tokens))
        for rows, scaled, kept in self._pieces():
            found[rows] = _probability(scaled, self._tokens[rows], kept)
        return found

    def entropies(self) -> Tensor:
        """Return the entropy of each distribution in nats, float32 [N]."""
        found = self._logits.new_empty(len(self._tokens))
        for rows, _, kept in self._pieces():
            found[rows] = entropies_of(kept)
        return found

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Go through the rows, some at a time: their places, their logits, and what is left of
        these. Rows with a temperature come again, over it."""
        size = rows_per_chunk(self._logits.shape[1])
        places = torch.arange(len(self._logits), device=self._logits.device)
        for start in range(0, len(places), size):
            rows = places[start : start + size]
            part = self._logits[rows]
            yield rows, part, part
        for draw in self._rows.draws:
            for start in range(0, len(draw.rows), size):
                piece = slice(start, start + size)
                rows = draw.rows[piece]
                part = self._logits[rows]
                scaled = (part - part.amax(1, keepdim=True)) / draw.temperature[piece, None]
                kept, _ = keep_likely(
                    scaled,
                    draw.top_k[piece],
                    draw.top_p[piece],
                    draw.min_p[piece],
                    draw.largest_top_k,
                    uses_top_p=draw.uses_top_p,
                    uses_min_p=draw.uses_min_p,
                )
                yield rows, scaled, kept


def _probability(logits: Tensor, tokens: Tensor, kept: Tensor) -> Tensor:
    """Return the share of each token, float32 [N], of the tokens that are kept."""
    chosen = logits.gather(1, tokens[:, None])[:, 0].double()
    return (chosen - kept.double().logsumexp(1)).exp().float()


def entropies_of(logits: Tensor) -> Tensor:
    """Return the entropies of distributions, float32 [N], some of whose logits may be minus
    infinity."""
    logprobs = logits.double().log_softmax(1)
    return -torch.where(logprobs.isneginf(), 0.0, logprobs.exp() * logprobs).sum(1).float()
