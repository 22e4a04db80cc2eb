"""Settings of a batch as the sampler gets them, moved to the CPU at once."""

from collections.abc import Sequence

import torch

from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState
from nanoserve.executor.step.staging import Staging


def sampling_rows(states: Sequence[SamplingState], positions: Sequence[int]) -> SamplingRows:
    """positions: of the tokens to be sampled, in their sequences."""
    staging = Staging(torch.device("cpu"))
    rows = SamplingRows.stage(states, positions, staging)
    staging.transfer()
    return rows
