"""Drafter: the interface of what drafts the tokens that follow an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from nanoserve.executor.drafting.features import FeatureCache
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.step.forward_pass import BlockTable


@dataclass(slots=True)
class DraftedSequence:
    """A drafter's knowledge of one sequence, from its Begin on."""

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
    """Drafts tokens. What it drafts never changes an answer, only how many tokens a step
    answers."""

    @property
    def features(self) -> FeatureCache | None:
        """The pass that keeps the model's features for the drafter in every step; None if it needs
        none."""

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        """Propose as many tokens to follow each sequence's as are asked for, or fewer. Raises any
        error; FloatingPointError where its logits are not numbers."""


def sampled_tokens(logits: Tensor, settings: SamplingRows) -> list[int]:
    """One for each row of logits. Raises FloatingPointError where these are not numbers."""
    sampled = sample(logits, settings)
    if not bool(sampled.valid.all()):
        raise FloatingPointError("the drafter's logits are not numbers")
    tokens: list[int] = sampled.tokens.tolist()
    return tokens
