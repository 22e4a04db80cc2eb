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
        self._places: Tensor | None = None
        """int64 [2, F], for each placeholder row of the step: the place of its token, and of its
        sample in the step before."""

    def attach(self, runner: "ModelRunner") -> None:
        self._runner = runner

    def prepare(self, step: "PreparedStep") -> None:
        """Stage the places of the tokens to fill in. Raises RuntimeError if the last step did not
        sample one."""
        self._source, self._places = self._last, None
        places = [place for place, row in enumerate(step.rows) if row.placeholder]
        if places:
            sequences = [step.rows[place].sequence for place in places]
            targets = row_ends(step.rows)[places] - 1
            self._places = self._runner.staging.add(
                np.stack((targets, self._sampled_places(sequences)))
            )
        if step.plan.rows:
            self._last = step

    def begin(self, step: "PreparedStep") -> None:
        if self._places is None:
            return
        assert (
            step.inputs is not None
            and self._source is not None
            and self._source.sampled is not None
        )
        tokens = self._source.sampled.device_tokens
        assert tokens is not None
        targets, sources = self._places
        step.inputs.token_ids.index_copy_(0, targets, tokens.index_select(0, sources))

    def _sampled_places(self, sequences: list[int]) -> np.ndarray:
        """Find the place of each sequence among the samples of the last step."""
        sampled = None if self._last is None else self._last.sampled
        places = dict[int, int]()
        if sampled is not None and sampled.device_tokens is not None:
            places = {sequence: place for place, sequence in enumerate(sampled.sequences)}
        missing = [sequence for sequence in sequences if sequence not in places]
        if missing:
            raise RuntimeError(
                f"sequence {missing[0]} has a placeholder for a token that the plan before it does "
                "not sample"
            )
        return np.array([places[sequence] for sequence in sequences])
