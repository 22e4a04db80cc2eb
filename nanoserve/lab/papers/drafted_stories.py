"""The lecture's section 3.1 on the bundled storyteller: how much of its stories drafters
foresee."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from nanoserve.llm import LLM
from nanoserve.models.hub import DRAFT
from nanoserve.request import SamplingParams
from nanoserve.scheduler import Decision, Load, Policy

DRAFTERS = ("ngram", f"draft:{DRAFT}")
LOOKAHEAD = 4
_START, _LENGTH = "Once upon a time", 128


@dataclass(slots=True)
class _FixedLookahead(Policy):
    """Another policy with a fixed number of draft tokens."""

    policy: Policy

    def decide(self, load: Load) -> Decision:
        return replace(self.policy.decide(load), draft_tokens=LOOKAHEAD)


class Drafted(NamedTuple):
    tokens_a_step: float
    rows: int
    """Steps of a story that checked draft tokens; in the others nothing was proposed."""
    accepted: Sequence[int]
    """Steps in which draft token 1, 2, ... was right, with all draft tokens before it."""


@dataclass(frozen=True, slots=True)
class DraftedStories:
    """A job that has the storyteller write stories with a drafter; its outcome is a list by seed.
    Greedy ones go on with drawn beginnings: they would all be the same."""

    drafter: str
    greedy: bool
    seeds: tuple[int, ...]
    stories: int

    def run(self) -> list[Drafted]:
        with LLM(dtype="float32", eager=True, speculate=self.drafter) as llm:
            scheduler = llm.engine.scheduler
            scheduler.policy = _FixedLookahead(scheduler.policy)
            return [self._write(llm, seed) for seed in self.seeds]

    def _write(self, llm: LLM, seed: int) -> Drafted:
        drawn = SamplingParams(seed=seed, n=self.stories, max_tokens=16, ignore_eos=True)
        (output,) = llm.generate(_START, drawn)
        starts = [output.prompt_token_ids + one.token_ids for one in output.outputs]
        params = llm.default_sampling_params()
        if self.greedy:
            params = SamplingParams(temperature=0.0)
        before = llm.status.drafts
        llm.generate(
            starts,
            msgspec.structs.replace(params, seed=seed, max_tokens=_LENGTH + 1, ignore_eos=True),
        )
        counts = llm.status.drafts
        accepted = [now - then for now, then in zip(counts.accepted, before.accepted, strict=True)]
        written = self.stories * _LENGTH  # and a token each that the prompt's step answers
        return Drafted(written / (written - sum(accepted)), counts.rows - before.rows, accepted)
