"""MedusaDrafter: heads that draft several tokens at once from one hidden state."""

from collections.abc import Sequence

import numpy as np

from nanoserve.executor.drafting.drafter import DraftedSequence, sampled_tokens
from nanoserve.executor.drafting.features import FeatureCache
from nanoserve.executor.sampling.sampler import SamplingRows
from nanoserve.executor.step.staging import Staging
from nanoserve.models.draft_heads import MedusaHeads


class MedusaDrafter:
    """A Drafter (arXiv 2401.10774) without a cache of its own, and with as many draft tokens as
    heads."""

    def __init__(self, heads: MedusaHeads, features: FeatureCache, *, block_size: int) -> None:
        """`features`: the model's final hidden states."""
        self._heads, self._block_size, self.features = heads, block_size, features
        self._staging = Staging(next(heads.parameters()).device)

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        number = min(max(counts), len(self._heads.heads))
        # The hidden state that gave the last known token.
        slots = [one.block_table.slot(len(one.tokens) - 2, self._block_size) for one in sequences]
        places = self._staging.add(np.array(slots))
        states = [one.plain for one in sequences] * number
        positions = [len(one.tokens) + ahead for ahead in range(number) for one in sequences]
        settings = SamplingRows.stage(states, positions, self._staging)
        self._staging.transfer()
        logits = self._heads(self.features.read(places), number)  # [number, sequences, vocabulary]
        tokens = sampled_tokens(logits.flatten(0, 1), settings)
        drafts = []
        for place, count in enumerate(counts):
            draft = tokens[place :: len(sequences)]  # the sequence's token of each head
            drafts.append(draft[:count])
        return drafts
