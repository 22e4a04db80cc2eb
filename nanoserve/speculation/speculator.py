"""Speculator: gives the decode rows of a plan guesses, and learns from their answers."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import msgspec

from nanoserve.costs.predictor import Predictor
from nanoserve.costs.work import StepWork
from nanoserve.request import Sequence, Status
from nanoserve.speculation.choosing import COUNTS, Acceptance, choose_counts, step_seconds
from nanoserve.speculation.ngram import NgramIndex

_DECODE = Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.
_FIRST = Acceptance(accepted=2.4, tried=4.0, fading=0.99)
"""The record of all sequences before anything is verified: α is high, so that guessing is tried."""
_PROBE, _RAREST_PROBE = 16, 256
"""Tokens without a guess until a sequence checks one, and the most of them: each probe that fails doubles the wait."""
_RECONSIDERED = 8
"""Steps for which the choice of no guesses is kept: little that it hangs on changes, and it takes time to make."""
_NOTHING: tuple[tuple[int, ...], int] = ((), 0)
_FIRST_DRAFT_SHARE = 0.1
"""The time to draft a token over that of the step, until it is measured."""


@dataclass(slots=True)
class _Record:
    """What is known of guesses for one sequence."""

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0.0, 0.0))
    draft: tuple[int, ...] = ()
    """What the executor's drafter guessed last."""
    index: NgramIndex = field(default_factory=NgramIndex)
    tried: int = 0
    """How many tokens there were when a guess was last verified, or the sequence was first seen."""
    wait: int = _PROBE


class GuessCounts(msgspec.Struct, array_like=True):
    """What became of guesses since the engine started."""

    rows: int = 0
    """Rows that had guesses."""
    guesses: int = 0
    accepted: list[int] = msgspec.field(default_factory=lambda: [0] * COUNTS[-1])
    """Accepted guesses by their place in the row."""

    def __add__(self, other: "GuessCounts") -> "GuessCounts":
        """New counts: those of both."""
        accepted = [one + another for one, another in zip(self.accepted, other.accepted, strict=True)]
        return GuessCounts(self.rows + other.rows, self.guesses + other.guesses, accepted)


class Speculator:
    """``looks_up``: guesses come from the sequence's own tokens (n-grams); otherwise a drafter in the executor is asked
    for them, one step before. A step has at most ``token_budget`` tokens with its guesses. With ``feeds_tokens`` the
    next plan is made before a token is known, unless its sequence is ``guessing``."""

    def __init__(self, *, looks_up: bool, token_budget: int, feeds_tokens: bool = False) -> None:
        self.counts = GuessCounts()
        self._looks_up, self._token_budget, self._feeds_tokens = looks_up, token_budget, feeds_tokens
        self._records: dict[int, _Record] = {}
        self._all = Acceptance(_FIRST.accepted, _FIRST.tried, _FIRST.fading)
        self._draft_seconds: float | None = None  # of one token of each row
        self._pause = self._undrafted = 0  # steps until guesses are considered again, and since any were drafted

    def choose(
        self,
        sequences: SequenceOf[Sequence],
        work: Callable[[], StepWork],
        predictor: Predictor | None,
        wanted: int | None = None,
        in_flight: int = 0,
    ) -> list[tuple[tuple[int, ...], int]]:
        """For each sequence that a plan samples, its guesses, and how many tokens to draft after the answer. ``work``
        is the plan without guesses, beside so many others ``in_flight``. There are as many as are ``wanted``, or
        without a predictor as many as possible."""
        records = [self._record(one) for one in sequences]
        if wanted is not None:
            predictor = None
        most = COUNTS[-1] if wanted is None else min(wanted, COUNTS[-1])
        # The last token of an answer is sampled, never guessed; and a prompt's row has no guesses.
        room = [one.max_length - len(one.tokens) - 1 for one in sequences]
        found = [
            self._find(sequence, record, min(left, most) if sequence.status is _DECODE else 0)
            for sequence, record, left in zip(sequences, records, room, strict=True)
        ]
        counts = self._counts(sequences, records, list(map(len, found)), work, predictor, in_flight, drafting=False)
        drafts = [0] * len(records)
        if not self._looks_up:
            limits = [min(left - count, most) for left, count in zip(room, counts, strict=True)]
            drafts = self._counts(sequences, records, limits, work, predictor, in_flight, drafting=True)
            self._undrafted = 0 if any(drafts) else self._undrafted + 1
        chosen = list[tuple[tuple[int, ...], int]]()
        for sequence, guesses, count, draft in zip(sequences, found, counts, drafts, strict=True):
            sequence.guessing = bool(count or draft)
            chosen.append((guesses[:count], draft) if sequence.guessing else _NOTHING)
        return chosen

    def _record(self, sequence: Sequence) -> _Record:
        record = self._records.get(sequence.sequence_id)
        if record is None:
            record = self._records[sequence.sequence_id] = _Record(tried=len(sequence.tokens))
        return record

    def _find(self, sequence: Sequence, record: _Record, most: int) -> tuple[int, ...]:
        if most <= 0:
            return ()
        return record.index.guess(sequence.tokens, most) if self._looks_up else record.draft[:most]

    def _counts(
        self,
        sequences: SequenceOf[Sequence],
        records: SequenceOf[_Record],
        limits: SequenceOf[int],
        make_work: Callable[[], StepWork],
        predictor: Predictor | None,
        in_flight: int,
        *,
        drafting: bool,
    ) -> list[int]:
        """How many guesses each has, of at most its limit, or how many are drafted for the next step; one where it is
        time to try again."""
        if max(limits) <= 0:
            return [0] * len(limits)
        if predictor is None:
            return [max(0, limit) for limit in limits]
        if self._pause and (drafting or self._looks_up):
            counts, self._pause = [0] * len(limits), self._pause - 1
        else:
            work = make_work()
            step, prior = step_seconds(predictor, work), self._all.rate(0.0)
            each = 0.0 if self._looks_up else self._draft_seconds or _FIRST_DRAFT_SHARE * step(0)
            share, micro_batches, longest = predictor.slowest_share, in_flight + 1, max(limits)

            def seconds(guesses: int, most: int) -> float:
                """Until the rows are next: through all stages, or as often through one as there are micro-batches. What
                was drafted is checked at the pace at which it is drafted."""
                time, behind = step(guesses), (most if drafting else longest) * each
                return max(time + behind, micro_batches * (share * time + behind))

            rates = [record.acceptance.rate(prior) for record in records]
            budget, prompts = self._token_budget - work.tokens, work.tokens - work.decodes
            counts = choose_counts(rates, limits, seconds, budget, prompts)
            if (drafting or self._looks_up) and not any(counts):
                self._pause = _RECONSIDERED
        # To draft for one row takes as long as for many: those that are due wait for each other.
        if drafting and not any(counts) and self._undrafted < _PROBE:
            return counts
        return [
            count or int(limit > 0 and len(sequence.tokens) - record.tried >= record.wait)
            for count, limit, record, sequence in zip(counts, limits, records, sequences, strict=True)
        ]

    def learn(self, sequence: Sequence, guesses: int, answered: int, asked: int, draft: tuple[int, ...]) -> None:
        """A row with so many guesses was answered with so many tokens, which the sequence has by now, and with a draft
        of what follows, of the number that was asked for."""
        record = self._records.get(sequence.sequence_id)
        if record is None:
            return
        record.draft, length = draft, len(sequence.tokens)
        if guesses and answered:
            accepted = answered - 1
            record.tried = length
            record.wait = _PROBE if accepted else min(2 * record.wait, _RAREST_PROBE)
            self.counts.rows += 1
            self.counts.guesses += guesses
            for place in range(accepted):
                self.counts.accepted[place] += 1
            for acceptance in (record.acceptance, self._all):
                acceptance.learn(guesses, accepted)
        if asked and not draft:  # as good as a wrong guess
            record.tried, record.wait = length, min(2 * record.wait, _RAREST_PROBE)
            for acceptance in (record.acceptance, self._all):
                acceptance.learn(1, 0)
        if self._feeds_tokens and length - record.tried >= record.wait:
            sequence.guessing = not self._looks_up or bool(record.index.guess(sequence.tokens, 1))

    def learn_time(self, longest: int, seconds: float) -> None:
        """In a step with drafts of at most ``longest`` tokens, drafting took so long."""
        if longest and seconds > 0:
            each, before = seconds / longest, self._draft_seconds
            self._draft_seconds = each if before is None else 0.8 * before + 0.2 * each

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._records.pop(sequence_id, None)
