"""What a runner keeps of a sequence between its steps."""

import numpy as np

from nanoserve.runtime.sampling.grammars import SequenceGrammar
from nanoserve.runtime.sampling.sampler import SamplingState
from nanoserve.runtime.step.step_inputs import BlockTable
from nanoserve.scheduler.plan import Begin, Row


class SequenceRecord:
    """What the runner knows of one sequence from its Begin on."""

    def __init__(self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None) -> None:
        self.prompt = np.array(begin.tokens[: begin.prompt_length], np.int64)
        self.params = begin.params
        self.num_known = len(begin.tokens)
        self.block_table = BlockTable()
        self.sampling = SamplingState(begin, vocab_size, grammar)

    def take(self, row: Row) -> None:
        """Take note of a row that is about to be computed. What it samples counts as known: the device will know it.

        Raises:
            RuntimeError: if it has tokens that neither Begin nor sampling told: guesses are not verified here.
        """
        end = row.start + len(row.tokens)
        if end > self.num_known:
            raise RuntimeError(f"sequence {row.sequence}: a row goes beyond its {self.num_known} known tokens")
        if row.new_blocks:
            self.block_table.extend(row.new_blocks)
        if row.sample:
            self.num_known = max(self.num_known, end + 1)

    def prompt_targets(self, row: Row) -> np.ndarray:
        """The prompt tokens that the row's logits predict."""
        return self.prompt[row.start + 1 : row.start + 1 + len(row.tokens)]
