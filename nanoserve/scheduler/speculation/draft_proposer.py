"""DraftProposer: gives the decode rows of a plan draft tokens, and learns from their answers."""

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from functools import cache

from nanoserve.request import Placeholders, Sequence, Status
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.speculation.draft_lengths import Acceptance, choose_counts, step_seconds
from nanoserve.scheduler.speculation.ngram import NgramIndex
from nanoserve.scheduler.work import MAX_DRAFT_TOKENS, DraftCounts, StepWork

_DECODE = Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.
_FIRST = Acceptance(accepted=2.4, tried=4.0, fading=0.99)
"""The record of all sequences before anything is verified: α is high, so that speculation is
tried."""
_PROBE, _RAREST_PROBE = 16, 256
"""Plans between probes of an unprofitable drafter, and the most such plans: the wait doubles until
drafting pays."""
_RECONSIDERED = 8  # plans for which the choice of no draft tokens is kept, at most: it takes time
# plans with draft tokens until one has none though they would pay: what is never done is never
# timed
_PLAIN = 32
_TIMES_KEPT = 32
"""Choices for which predicted times are kept while as many rows decode: contexts grow slowly."""
_FIRST_DRAFT_SHARE = 0.1  # the time to draft a token over that of the step, until it is measured


@dataclass(slots=True)
class _Record:
    """Draft tokens of one sequence, and how often its draft tokens were accepted."""

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(0.0, 0.0))
    draft_tokens: tuple[int, ...] = ()
    length: int = 0
    """Last draft, and the sequence's length when it was made. The draft is compared with the tokens
    that followed, whether the model checked it or not."""
    index: NgramIndex = field(default_factory=NgramIndex)
    seen: int = 0
    wait: int = _PROBE
    """How many tokens there were when it was last considered, and how many more are planned as
    placeholders before it is again."""


class DraftProposer:
    """``looks_up``: draft tokens come from the sequence's own tokens (n-grams); otherwise a drafter
    in the executor is asked for them, one step before. A step has at most ``token_budget`` tokens
    with its draft tokens. With ``async_scheduling`` the next plan is made before a token is known,
    unless its sequence waits for the token."""

    def __init__(
        self, *, looks_up: bool, token_budget: int, async_scheduling: bool = False
    ) -> None:
        self.counts = DraftCounts()
        self._looks_up, self._token_budget, self._async_scheduling = (
            looks_up,
            token_budget,
            async_scheduling,
        )
        self._records: dict[int, _Record] = {}
        self._all = Acceptance(_FIRST.accepted, _FIRST.tried, _FIRST.fading)
        self._draft_seconds = math.inf  # of one token of each row
        self._pace_is_steady = False  # until then it is a bound
        self._plans = self._rests_until = 0
        self._plans_with_drafts = 0  # since one without
        self._asked = set[int]()  # sequences with drafts under way or not considered yet
        self._next_probe = self._probe_wait = _PROBE
        self._step: Callable[[int], float] = float
        self._step_of, self._step_age = (0, 0), 0

    def rests(self) -> bool:
        """Whether nothing is drafted for the next plan, as nothing was for one that was like it."""
        self._plans += 1
        return self._plans < self._rests_until and not (self._asked or self._async_scheduling)

    def choose(
        self,
        sequences: SequenceOf[Sequence],
        work: Callable[[], StepWork],
        predictor: Predictor | None,
        wanted: int | None = None,
        in_flight: int = 0,
        prompt_tokens: int = 0,
    ) -> list[tuple[tuple[int, ...], int]]:
        """Return, for each sequence that a plan samples, its draft tokens and how many to draft
        after the answer.

        ``work`` is the plan without draft tokens. It has ``prompt_tokens``; ``in_flight`` other
        plans are in flight. The predictor tells how many draft tokens pay. ``wanted`` sets their
        number for each row instead; without either, each row has as many as possible.
        """
        most = MAX_DRAFT_TOKENS
        if wanted is not None:
            predictor = None
            most = min(wanted, MAX_DRAFT_TOKENS)
        records = [self._record_of(sequence) for sequence in sequences]
        # The last token of an answer is sampled, never drafted.
        room = [sequence.max_length - len(sequence.tokens) - 1 for sequence in sequences]
        found = [
            self._find(sequence, record, min(left, most))
            for sequence, record, left in zip(sequences, records, room, strict=True)
        ]
        some_found = any(found)
        seconds = None
        if predictor is not None and (some_found or not self._looks_up):
            seconds = self._seconds(work, predictor, (len(sequences), prompt_tokens), in_flight + 1)
        is_plain = seconds is not None and not prompt_tokens and self._plans_with_drafts >= _PLAIN
        counts = drafts = [0] * len(records)
        if some_found and not is_plain:
            limits = [len(draft_tokens) for draft_tokens in found]
            counts = self._counts(records, limits, seconds, prompt_tokens, max(limits))
        self._plans_with_drafts += 1
        if not any(counts):
            self._plans_with_drafts = 0
        if not self._looks_up:
            places = zip(room, counts, strict=True)
            limits = [max(0, min(left - count, most)) for left, count in places]
            drafts = self._counts(records, limits, seconds, prompt_tokens)
            self._ask(sequences, records, limits, drafts)
        if not (is_plain or prompt_tokens or any(counts) or any(drafts)):
            pause = _RECONSIDERED
            if self._looks_up and not some_found:
                pause = min(len(records) // 2, _RECONSIDERED)
            self._rests_until = self._plans + 1 + pause
        if self._async_scheduling:
            checked = zip(sequences, records, counts, drafts, strict=True)
            for sequence, record, count, draft in checked:
                waits = is_plain or count > 0 or draft > 0
                if sequence.placeholders is not None:
                    self._plan_waiting(sequence.placeholders, record, waits=waits)
        return [
            (one[:count], draft) for one, count, draft in zip(found, counts, drafts, strict=True)
        ]

    def _record_of(self, sequence: Sequence) -> _Record:
        """Return the record of a sequence that is considered now."""
        record = self._records.get(sequence.sequence_id)
        if record is None:
            record = self._records[sequence.sequence_id] = _Record()
        record.seen = len(sequence.tokens)
        self._asked.discard(sequence.sequence_id)
        return record

    def _plan_waiting(self, placeholders: Placeholders, record: _Record, *, waits: bool) -> None:
        """Note whether a sequence's next plan waits for its token, and how soon it is considered
        again if not."""
        placeholders.wait = waits
        if waits:
            record.wait = _PROBE
        else:
            record.wait = min(2 * record.wait, _RAREST_PROBE)

    def _find(self, sequence: Sequence, record: _Record, most: int) -> tuple[int, ...]:
        """Return at most ``most`` draft tokens; none for a row of a prompt."""
        if most <= 0 or sequence.status is not _DECODE:
            return ()
        length = len(sequence.tokens)
        if self._looks_up or record.length != length:
            self._compare(sequence, record)
        if self._looks_up:
            record.draft_tokens = self._look_up(sequence, record, most)
            record.length = length
        return record.draft_tokens[:most]

    def _look_up(self, sequence: Sequence, record: _Record, most: int) -> tuple[int, ...]:
        return record.index.propose(sequence.tokens, most)

    def _compare(self, sequence: Sequence, record: _Record) -> None:
        """Learn from what has followed the draft tokens for a sequence."""
        draft_tokens = record.draft_tokens
        record.draft_tokens = ()
        following = sequence.tokens[record.length : record.length + len(draft_tokens)]
        if not following:
            return
        right = 0
        for draft_token, token in zip(draft_tokens, following, strict=False):
            if draft_token != token:
                break
            right += 1
        self._take_note(record, len(following), right)

    def _take_note(self, record: _Record, draft_tokens: int, right: int) -> None:
        for acceptance in (record.acceptance, self._all):
            acceptance.learn(draft_tokens, right)

    def _seconds(
        self,
        make_work: Callable[[], StepWork],
        predictor: Predictor,
        key: tuple[int, int],
        micro_batches: int,
    ) -> Callable[[int, int], float]:
        """Return a function that predicts the time until the rows of a plan are planned again, by
        the number of draft tokens to check and the longest draft to make. The plan has to pass all
        stages, and each stage has to compute every micro-batch once."""
        if key != self._step_of or not self._step_age:
            self._step = cache(step_seconds(predictor, make_work()))
            self._step_of, self._step_age = key, _TIMES_KEPT
        self._step_age -= 1
        step, share = self._step, predictor.slowest_share
        each = self._draft_seconds
        if self._looks_up:
            each = 0.0
        if not self._pace_is_steady:
            each = min(each, _FIRST_DRAFT_SHARE * step(0))

        def seconds(draft_tokens: int, drafted: int) -> float:
            time, drafting = step(draft_tokens), drafted * each
            return max(time + drafting, micro_batches * (share * time + drafting))

        return seconds

    def _counts(
        self,
        records: SequenceOf[_Record],
        limits: list[int],
        seconds: Callable[[int, int], float] | None,
        prompt_tokens: int,
        longest: int = 0,
    ) -> list[int]:
        """Choose the number of draft tokens of each record, at most its limit. A plan that checks
        drafts takes the time for drafting its ``longest``."""
        if seconds is None:
            return limits
        prior = self._all.rate(0.0)
        budget = self._token_budget - prompt_tokens - len(limits)
        rates = [record.acceptance.rate(prior) for record in records]

        def at_pace_of_longest(draft_tokens: int, _: int) -> float:
            return seconds(draft_tokens, longest)

        paced = seconds
        if longest:
            paced = at_pace_of_longest
        return choose_counts(rates, limits, paced, budget, prompt_tokens)

    def _ask(
        self,
        sequences: SequenceOf[Sequence],
        records: list[_Record],
        limits: list[int],
        drafts: list[int],
    ) -> None:
        """Note the sequences that are asked for drafts. If there are none, now and then ask one as
        a probe."""
        if any(drafts):
            self._probe_wait = _PROBE
        elif self._plans >= self._next_probe and any(limits):
            possible = [place for place, limit in enumerate(limits) if limit]
            longest_ago = min(possible, key=lambda place: records[place].length)
            drafts[longest_ago] = 1
            self._probe_wait = min(2 * self._probe_wait, _RAREST_PROBE)
        if any(drafts):
            self._next_probe = self._plans + self._probe_wait
            for sequence, draft in zip(sequences, drafts, strict=True):
                if draft:
                    self._asked.add(sequence.sequence_id)

    def learn(
        self,
        sequence: Sequence,
        draft_tokens: int,
        answered: int,
        asked: int,
        draft: tuple[int, ...],
    ) -> None:
        """Learn from a row's answer. The row had ``draft_tokens``; the sequence has its
        ``answered`` tokens by now. The drafter was ``asked`` for a number of tokens to follow them,
        and returned ``draft``."""
        record = self._records.get(sequence.sequence_id)
        if record is None:
            return
        if draft_tokens and answered:
            self.counts.rows += 1
            self.counts.draft_tokens += draft_tokens
            for place in range(answered - 1):
                self.counts.accepted[place] += 1
        length = len(sequence.tokens)
        if asked:
            self._compare(sequence, record)
            record.draft_tokens, record.length = draft, length
            if not draft:  # as good as a wrong draft token
                self._take_note(record, 1, 0)
        placeholders = sequence.placeholders
        if (
            placeholders is not None
            and not placeholders.wait
            and length - record.seen >= record.wait
        ):
            placeholders.wait = not self._looks_up or bool(record.index.propose(sequence.tokens, 1))

    def learn_pace(self, each: float, *, steady: bool) -> None:
        """Learn how long drafting took for ``each`` token of the longest draft. If it was not
        ``steady``, the drafter also read tokens that it had not seen, so this is an upper bound."""
        if not steady:
            self._draft_seconds = min(self._draft_seconds, each)
            return
        if self._pace_is_steady:
            each = 0.8 * self._draft_seconds + 0.2 * each
        self._draft_seconds = each
        self._pace_is_steady = True

    def forget(self, sequence_id: int) -> None:
        """Forget a sequence that has ended."""
        self._records.pop(sequence_id, None)
        self._asked.discard(sequence_id)
