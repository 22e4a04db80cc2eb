"""Verification: a row with draft tokens is sampled behind each, and answered by the longest run
that is right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.sampling.sampler import SamplingState
from nanoserve.executor.step.answers import NOT_NUMBERS, SampledRows
from nanoserve.executor.step.staging import Staging
from nanoserve.request import TokenLogprob
from nanoserve.scheduler.optional import draft_of
from nanoserve.scheduler.plan import Answer, Row

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep


class Verification(Mechanism):
    """Lets rows hold draft tokens, which no sampling has answered yet (arXiv 2211.17192)."""

    def attach(self, runner: "ModelRunner") -> None:
        self._runner = runner
        runner.stage_sampled = VerifiedRows.stage

    def prepare(self, step: "PreparedStep") -> None:
        """Have the draft tokens of rows count as known."""
        for row in step.rows:
            record = self._runner.records.get(row.sequence) if draft_of(row).verify else None
            if record is None:
                continue
            end = row.start + len(row.tokens)
            if end - draft_of(row).verify <= record.num_known:
                record.num_known = max(record.num_known, end)


class VerifiedRow(NamedTuple):
    """A row that is sampled behind its last known token and behind each of its draft tokens."""

    sequence: int
    state: SamplingState
    drafts: tuple[int, ...]


@dataclass(slots=True)
class VerifiedRows(SampledRows):
    """Sampled rows of which each has one position more than it has draft tokens."""

    rows: list[VerifiedRow] = field(default_factory=list)

    @classmethod
    def stage(
        cls,
        rows: Sequence[Row],
        ends: np.ndarray,
        states: Sequence[SamplingState],
        staging: Staging,
    ) -> "VerifiedRows | None":
        verified = list[VerifiedRow]()
        sequences, states_there = list[int](), list[SamplingState]()
        positions, last_tokens = list[int](), list[int]()
        for row, state, end in zip(rows, states, ends.tolist(), strict=True):
            if not row.sample:
                continue
            first = len(row.tokens) - draft_of(row).verify
            drafts = row.tokens[first:]
            verified.append(VerifiedRow(row.sequence, state, drafts))
            for count in range(draft_of(row).verify + 1):
                sequences.append(row.sequence)
                states_there.append(state.after(drafts[:count]))
                positions.append(row.start + first + count)
                last_tokens.append(end - 1 - draft_of(row).verify + count)
        if not verified:
            return None
        staged = cls.at_positions(
            sequences, states_there, positions, np.array(last_tokens), staging
        )
        staged.rows = verified
        return staged

    def answers(self) -> Iterator[Answer]:
        if self.tokens is None or self.valid is None:
            return
        logprobs = self.known_logprobs()
        tokens, valid = self.tokens.tolist(), self.valid.tolist()
        first = 0
        for row in self.rows:
            end = first + len(row.drafts) + 1
            taken, error = _accept(row, tokens[first:end], valid[first:end])
            if taken:
                known = list[TokenLogprob]()
                for place in range(first, first + len(taken)):
                    known.extend(logprobs.get(place, ()))
                complete = row.state.grammar is not None and row.state.grammar.complete
                yield Answer(row.sequence, tuple(taken), tuple(known), complete=complete)
            else:
                yield Answer(row.sequence, error=error or NOT_NUMBERS)
            first = end


def _accept(
    row: VerifiedRow, tokens: Sequence[int], valid: Sequence[bool]
) -> tuple[list[int], str | None]:
    """Take the sampled tokens of a row up to the first that is not its draft token, and have its
    state note them. Returns them, and the grammar's error, if there is one. An error behind a token
    is the next step's."""
    grammar = row.state.grammar
    taken = list[int]()
    for place, token in enumerate(tokens):
        if not valid[place]:
            break
        row.state.append(token)
        if grammar is not None and grammar.error is not None:
            return taken, grammar.error
        taken.append(token)
        if place == len(row.drafts) or token != row.drafts[place]:
            break
        if grammar is not None and grammar.complete:
            break
    return taken, None
