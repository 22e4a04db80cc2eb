"""Settings of a batch as the sampler gets them, moved to the CPU at once, and logits as penalties
leave them."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from nanoserve.executor.sampling.sampler import (
    SamplingRows,
    SamplingState,
    position_keys,
    sequence_keys,
)
from nanoserve.executor.step.staging import Staging
from nanoserve.request import SamplingParams


def sampling_rows(states: Sequence[SamplingState], positions: Sequence[int]) -> SamplingRows:
    """positions: of the tokens to be sampled, in their sequences."""
    staging = Staging(torch.device("cpu"))
    rows = SamplingRows.stage(states, positions, staging)
    staging.transfer()
    return rows


def row_keys(seed: np.ndarray, index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Two words of randomness per row: int32 [R, 2]."""
    return position_keys(sequence_keys(seed, index), position)


def penalized(
    params: SamplingParams, logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Logits [V] after the penalties, counted anew: repetition as in CTRL, the others as OpenAI's
    API has them."""
    values = logits.tolist()
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        values[token] *= 1 / factor if values[token] > 0 else factor
    for token, times in Counter(output).items():
        values[token] -= params.frequency_penalty * times + params.presence_penalty
    return values
