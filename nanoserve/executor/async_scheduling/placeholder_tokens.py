"""PlaceholderTokens: the tokens of one step go into the next one on the device, before the host
knows them."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.step.forward_pass import row_ends

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep


class PlaceholderTokens(Mechanism):
    """Fills in the tokens of placeholder rows, which are planned while the step that samples them
    is in flight.

    Each step is prepared and begun before the next one is prepared, as a LocalExecutor does.
    """

    def __init__(self) -> None:
        self._last: PreparedStep | None = None  # the last step with rows
        self._source: PreparedStep | None = None  # the step before this one, if it has placeholders
        self._places: Tensor | None = None
        """int64 [2, F], for each placeholder row of the step: the place of its token, and of its
        sample in the step before; None where all rows are placeholders of the samples before, in
        their order."""

    def attach(self, runner: "ModelRunner") -> None:
        self._runner = runner

    def prepare(self, step: "PreparedStep") -> None:
        """Stage the places of the tokens to fill in. Raises RuntimeError if the last step did not
        sample one."""
        self._source, self._places = None, None
        places = [place for place, row in enumerate(step.rows) if row.placeholder]
        if places:
            self._source = self._last
            sampled = self._sampled_sequences()
            sequences = [step.rows[place].sequence for place in places]
            # As in most steps, when the same sequences go on.
            if len(places) < len(step.rows) or sequences != sampled:
                targets, sources = row_ends(step.rows)[places] - 1, _places_of(sequences, sampled)
                self._places = self._runner.staging.add(np.stack((targets, sources)))
        if step.plan.rows:
            self._last = step

    def begin(self, step: "PreparedStep") -> None:
        if self._source is None:
            return
        assert step.inputs is not None and self._source.sampled is not None
        tokens = self._source.sampled.device_tokens
        assert tokens is not None
        if self._places is None:
            step.inputs.token_ids.copy_(tokens)
            return
        targets, sources = self._places
        step.inputs.token_ids.index_copy_(0, targets, tokens.index_select(0, sources))

    def _sampled_sequences(self) -> list[int]:
        """The sequences that the last step sampled, in the order of its tokens on the device."""
        sampled = None if self._last is None else self._last.sampled
        if sampled is None or sampled.device_tokens is None:
            return []
        return sampled.sequences


def _places_of(sequences: list[int], sampled: list[int]) -> np.ndarray:
    """Find the place of each sequence among those that were sampled."""
    places = {sequence: place for place, sequence in enumerate(sampled)}
    missing = [sequence for sequence in sequences if sequence not in places]
    if missing:
        raise RuntimeError(
            f"sequence {missing[0]} has a placeholder for a token that the plan before it does "
            "not sample"
        )
    return np.array([places[sequence] for sequence in sequences])
