"""Drafting: asks a drafter for the tokens that may follow the answers of a step."""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from msgspec.structs import replace

from nanoserve.errors import first_line
from nanoserve.executor.drafting.drafter import DraftedSequence, Drafter
from nanoserve.executor.drafting.features import FeaturePass
from nanoserve.executor.mechanism import Mechanism
from nanoserve.scheduler.optional import draft_of
from nanoserve.scheduler.plan import Answer, Row, StepResult

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep

SampledSequences = Mapping[int, tuple[Row, DraftedSequence]]
"""The sampled rows of a step, by sequence."""


class Drafting(Mechanism):
    """Asks a drafter behind each step, until it fails."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.failed = False
        self._sequences = dict[int, DraftedSequence]()
        self._sampled = dict[int, SampledSequences]()  # by the number of a plan that is in flight

    def attach(self, runner: "ModelRunner") -> None:
        """Have the runner's forward pass keep the features that the drafter reads."""
        self._runner = runner
        if self.drafter.features is not None:
            runner.forward = FeaturePass(
                runner.decoder, runner.caches, runner.run_layer, self.drafter.features
            )

    def prepare(self, step: "PreparedStep") -> None:
        """Follow the sequences that begin and end, and note which rows are sampled."""
        for sequence in step.plan.end:
            self._sequences.pop(sequence, None)
        for begin in step.plan.begin:
            record = self._runner.records[begin.sequence]
            drafted = DraftedSequence(list(begin.tokens), record.block_table, record.sampling)
            self._sequences[begin.sequence] = drafted
        sampled = dict[int, tuple[Row, DraftedSequence]]()
        for row in step.rows:
            if row.sample and row.sequence in self._sequences:
                sampled[row.sequence] = row, self._sequences[row.sequence]
        self._sampled[step.plan.step] = sampled

    def begin(self, step: "PreparedStep") -> None:
        """Copy features with the blocks."""
        if self.drafter.features is not None and step.copies is not None:
            self.drafter.features.copy(step.copies)

    def complete(self, step: "PreparedStep", result: StepResult) -> StepResult:
        began = time.monotonic()
        answers = self.follow(result.answers, self._sampled.pop(step.plan.step, {}))
        if answers is result.answers:
            return result
        return replace(result, answers=answers, draft_seconds=time.monotonic() - began)

    def abandon(self) -> None:
        self._sampled.clear()

    def follow(self, answers: tuple[Answer, ...], sampled: SampledSequences) -> tuple[Answer, ...]:
        """The answers with the drafts that their rows ask for. A draft ends before what a grammar
        forbids. Once the drafter has raised an error, which is told, nothing is drafted."""
        asked = list[tuple[int, DraftedSequence, int]]()
        for place, answer in enumerate(answers):
            if answer.sequence not in sampled or not answer.tokens:
                continue
            row, sequence = sampled[answer.sequence]
            sequence.tokens += answer.tokens
            # what is behind was drafted wrong
            sequence.seen = min(sequence.seen, len(sequence.tokens) - 1)
            if draft_of(row).propose and not answer.complete:
                asked.append((place, sequence, draft_of(row).propose))
        if not asked or self.failed:
            return answers
        sequences = [sequence for _, sequence, _ in asked]
        counts = [count for _, _, count in asked]
        try:
            with torch.inference_mode():
                drafts = self.drafter.draft(sequences, counts)
        except Exception as error:  # of any kind: decoding goes on without it
            self.failed, drafts = True, []
            logging.getLogger("nanoserve").warning(
                "nanoserve: nothing is drafted any more: %s", first_line(error)
            )
        followed = list(answers)
        for (place, sequence, _), draft in zip(asked, drafts, strict=False):
            grammar = sequence.sampling.grammar
            possible = len(draft) if grammar is None else grammar.after(draft)[1]
            followed[place] = replace(answers[place], draft=tuple(draft[:possible]))
        return tuple(followed)
