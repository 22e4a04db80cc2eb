"""DraftModel: a smaller model with the same tokenizer, or an EAGLE head, drafts one token after the
other."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from nanoserve.executor.drafting.drafter import DraftedSequence, sampled_tokens
from nanoserve.executor.drafting.features import FeatureCache
from nanoserve.executor.sampling.sampler import SamplingRows
from nanoserve.executor.step.forward_pass import (
    BlockTable,
    ForwardFunction,
    ForwardPass,
    InputBuilder,
    SmallSteps,
    make_caches,
    row_ends,
)
from nanoserve.executor.step.staging import Staging
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.models.draft_heads import EagleHead
from nanoserve.scheduler.plan import Row
from triton_ops.cache import SKIPPED_SLOT

_MOST_AT_ONCE = 512
"""Tokens of a row in one pass, so that a long prompt needs little memory."""


class DraftModel:
    """A Drafter (arXiv 2211.17192) whose KV cache has the model's blocks: what it keeps of a
    position is in the same block and slot.

    It is lazy: it computes what it has not seen of a sequence when it is asked for draft tokens. It
    samples with the noise that the model will be sampled with, but without penalties and grammars.

    An EAGLE head (2401.15077) is one into which pairs enter: at each position that feature and the
    token behind it. The feature that it drafts stands in the cache of features until the model has
    computed that position.
    """

    def __init__(
        self,
        decoder: Decoder,
        features: FeatureCache | None = None,
        *,
        num_blocks: int,
        block_size: int,
        run_layer: LayerFunction = DecoderLayer.__call__,
    ) -> None:
        """`features`: what the steps of the model keep for a `decoder` that is an EAGLE head."""
        device = decoder.device
        caches = make_caches(
            decoder.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            device=device,
        )
        self._decoder = decoder.eval()
        self.forward: ForwardFunction = ForwardPass(decoder, caches, run_layer)
        self._small_steps = SmallSteps(decoder)
        self._inputs, self._staging = InputBuilder(block_size), Staging(device)
        self.features = features
        # how far the token that enters at a position is ahead of it
        self._shift = 0 if features is None else 1

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        unfinished = [place for place, count in enumerate(counts) if count > 0]
        while unfinished:
            rows = [self._next_row(sequences[place], drafts[place]) for place in unfinished]
            num_tokens = sum(len(row.tokens) for row in rows)
            context_tokens = num_tokens + sum(row.start for row in rows)
            with self._small_steps.on_one_thread(num_tokens, context_tokens):
                draft_tokens = self._pass(rows, [sequences[place] for place in unfinished])
            for place, row, draft_token in zip(unfinished, rows, draft_tokens, strict=True):
                sequences[place].seen += len(row.tokens)
                if row.sample:
                    drafts[place].append(draft_token)
            unfinished = [place for place in unfinished if len(drafts[place]) < counts[place]]
        if self.features is not None:  # keys of drafted features are never right
            for sequence in sequences:
                sequence.seen = min(sequence.seen, len(sequence.tokens) - self._shift)
        return drafts

    def _next_row(self, sequence: DraftedSequence, draft: list[int]) -> Row:
        """Make a row of the tokens that are not in the cache yet. It samples if no token remains
        after it."""
        start, known = sequence.seen, len(sequence.tokens) - self._shift
        first = start + self._shift
        missing = tuple(sequence.tokens[first : first + _MOST_AT_ONCE])
        unseen_draft = tuple(draft[max(0, start - known) :])
        tokens = (missing + unseen_draft)[:_MOST_AT_ONCE]
        return Row(0, start, tokens, sample=start + len(tokens) == known + len(draft))

    def _pass(self, rows: Sequence[Row], sequences: Sequence[DraftedSequence]) -> list[int]:
        """Run one forward pass and sample a token after each row."""
        ends, tables = row_ends(rows), [sequence.block_table for sequence in sequences]
        inputs = self._inputs.build(rows, ends, tables, self._staging.add)
        last_tokens = self._staging.add(ends - 1)
        positions = [row.start + len(row.tokens) + self._shift for row in rows]
        settings = SamplingRows.stage([one.plain for one in sequences], positions, self._staging)
        if self.features is None:
            self._staging.transfer()
            hidden = self.forward(inputs)[last_tokens]
        else:
            drafted = self._staging.add(self._slots_behind(rows, tables))
            self._staging.transfer()
            features = self.features.read(inputs.batch.slot_mapping)
            inputs.intermediate_hidden_states = cast(EagleHead, self._decoder).pair(
                inputs.token_ids, features
            )
            hidden = self.forward(inputs)[last_tokens]
            self.features.write(drafted, hidden)
        return sampled_tokens(self._decoder.compute_logits(hidden), settings)

    def _slots_behind(self, rows: Sequence[Row], tables: Sequence[BlockTable]) -> np.ndarray:
        """Where the feature that a row drafts belongs; nowhere if the model's own is there."""
        slots = []
        for row, table in zip(rows, tables, strict=True):
            slot = SKIPPED_SLOT
            if row.sample:
                slot = table.slot(row.start + len(row.tokens), self._inputs.block_size)
            slots.append(slot)
        return np.array(slots)
