"""Sampled tokens that stay on the device and feed the next step, before the host knows them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanoserve.runtime.step.staging import Staged, Staging
from nanoserve.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class FedTokens:
    """The fed rows of one step."""

    source: Tensor
    """int64 [V], what the plan before sampled."""
    places: Staged
    """int64 [2, F]: of each fed row's token in this step, and in ``source``."""

    def write_into(self, token_ids: Tensor) -> None:
        """Put the tokens where they belong among those of the step, int64 [T]; once ``places`` is transferred."""
        places = self.places.tensor
        token_ids.index_copy_(0, places[0], self.source.index_select(0, places[1]))


class LastTokens:
    """What the last plan with rows samples, by sequence."""

    def __init__(self) -> None:
        self._sequences: list[int] = []
        self._tokens: Tensor | None = None

    def keep(self, sequences: list[int], tokens: Tensor | None) -> None:
        """Of these sequences, in this order, the tokens int64 [number of sequences]; None if the plan samples none."""
        self._sequences, self._tokens = sequences, tokens

    def stage(self, rows: Sequence[Row], ends: np.ndarray, staging: Staging) -> FedTokens | None:
        """Prepare the fed rows of a plan; None if it has none. `ends`: as by `step_inputs.row_ends`.

        Raises:
            RuntimeError: if the last plan did not sample a token for one of them.
        """
        fed = [place for place, row in enumerate(rows) if row.fed]
        if not fed:
            return None
        place_of = {sequence: place for place, sequence in enumerate(self._sequences)}
        sequences = [rows[place].sequence for place in fed]
        missing = [sequence for sequence in sequences if sequence not in place_of]
        if missing or self._tokens is None:
            raise RuntimeError(f"sequence {missing[0]} is fed a token that the plan before it does not sample")
        sources = np.array([place_of[sequence] for sequence in sequences])
        return FedTokens(self._tokens, staging.add(np.stack((ends[fed] - 1, sources))))
