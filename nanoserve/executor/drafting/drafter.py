"""Drafter: the interface of what guesses the tokens that follow an answer, and how a step asks it."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from nanoserve.errors import first_line
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.step.forward_pass import BlockTable, FeatureCache
from nanoserve.scheduler.plan import Answer, Row


@dataclass(slots=True)
class DraftedSequence:
    """What a drafter knows of one sequence, from its Begin on."""

    tokens: list[int]
    """All that are known."""
    block_table: BlockTable
    sampling: SamplingState
    seen: int = 0
    """Positions that are in the drafter's own cache and right."""
    plain: SamplingState = field(init=False)
    """How a drafter samples."""

    def __post_init__(self) -> None:
        self.plain = self.sampling.plain()


class Drafter(Protocol):
    """Guesses tokens. What it guesses never changes an answer, only how many tokens a step answers."""

    @property
    def features(self) -> FeatureCache | None:
        """What steps keep of the model for it, before it is asked; None if it needs nothing."""

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        """As many tokens to follow each sequence's, or fewer. Raises any error; FloatingPointError where its logits are
        not numbers."""


@dataclass(slots=True)
class Drafting:
    """Asks a drafter, until it fails."""

    drafter: Drafter
    failed: bool = False

    def follow(
        self, answers: tuple[Answer, ...], rows: Mapping[int, tuple[Row, DraftedSequence]]
    ) -> tuple[tuple[Answer, ...], float]:
        """The answers with the drafts that their rows ask for, and the seconds that this took. `rows` are the sampled
        ones by sequence. A draft ends before what a grammar forbids. Once the drafter has raised an error, which is
        told, nothing is guessed."""
        asked = list[tuple[int, DraftedSequence, int]]()
        for place, answer in enumerate(answers):
            if answer.sequence not in rows or not answer.tokens:
                continue
            row, sequence = rows[answer.sequence]
            sequence.tokens += answer.tokens
            sequence.seen = min(sequence.seen, len(sequence.tokens) - 1)  # what is behind was guessed wrong
            if row.draft and not answer.complete:
                asked.append((place, sequence, row.draft))
        if not asked or self.failed:
            return answers, 0.0
        began, drafted = time.monotonic(), list(answers)
        try:
            with torch.inference_mode():
                drafts = self.drafter.draft([one for _, one, _ in asked], [count for *_, count in asked])
        except Exception as error:  # of any kind: decoding goes on without it
            self.failed, drafts = True, []
            logging.getLogger("nanoserve").warning("nanoserve: nothing is guessed any more: %s", first_line(error))
        for (place, sequence, _), draft in zip(asked, drafts, strict=False):
            grammar = sequence.sampling.grammar
            possible = len(draft) if grammar is None else grammar.after(draft)[1]
            drafted[place] = replace(answers[place], draft=tuple(draft[:possible]))
        return tuple(drafted), time.monotonic() - began


def sampled_tokens(logits: Tensor, settings: SamplingRows) -> list[int]:
    """One for each row of logits. Raises FloatingPointError where these are not numbers."""
    sampled = sample(logits, settings)
    if not bool(sampled.valid.all()):
        raise FloatingPointError("the drafter's logits are not numbers")
    tokens: list[int] = sampled.tokens.tolist()
    return tokens
