"""Results of a step: sampled tokens and log probabilities, on the device, then on the host, then as
answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.sampling.sampler import (
    Sampled,
    SamplingRows,
    SamplingState,
    batch_settings,
    sample,
)
from nanoserve.executor.step.forward_pass import row_lengths
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder
from nanoserve.request import TokenLogprob
from nanoserve.scheduler.plan import Answer, Row
from triton_ops import token_logprobs

NOT_NUMBERS = "the model's logits are not numbers (NaN or infinite), or no token was left to sample"
ELEMENTS_PER_CHUNK = 1 << 24


def rows_per_chunk(vocab_size: int) -> int:
    """How many positions' logits to hold at once, so that a long prompt of a large vocabulary still
    fits: 64 MiB."""
    return max(1, ELEMENTS_PER_CHUNK // vocab_size)


class LogprobColumns(NamedTuple):
    """Log probabilities of N tokens from raw logits, as tensors that may still be on the device."""

    tokens: Tensor
    logprobs: Tensor
    """float32 [N]; of logits that are not numbers, anything."""
    ranks: Tensor
    """int64 [N]."""
    best: Tensor
    """int64 [N, K], the likeliest tokens."""
    best_logprobs: Tensor
    """float32 [N, K]."""

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, most: int) -> "LogprobColumns":
        """The columns of logits, float32 [N, V], with the `most` likeliest tokens of each row;
        waits for nothing."""
        return cls(tokens, *token_logprobs(logits, tokens, most))

    def through(self, move: Callable[[Tensor], Tensor]) -> "LogprobColumns":
        return LogprobColumns._make(move(column) for column in self)

    def rows(self, tops: Sequence[int]) -> Iterator[TokenLogprob]:
        """One by one, on the host. tops: how many of the likeliest tokens to name for each."""
        tokens, ranks, logprobs = self.tokens.tolist(), self.ranks.tolist(), self.logprobs.tolist()
        best, best_logprobs = self.best.tolist(), self.best_logprobs.tolist()
        for place, top in enumerate(tops):
            named = zip(best[place][:top], best_logprobs[place][:top], strict=True)
            yield TokenLogprob(tokens[place], logprobs[place], ranks[place], tuple(named))


@dataclass(slots=True)
class ScoredPrompt:
    """The L prompt tokens that one row's logits predict, with their log probabilities once they are
    scored."""

    sequence: int
    first_token: int
    """Where the row's tokens begin in the step."""
    targets: Tensor
    """int64 [L], the prompt tokens that the hidden states from there on predict."""
    top: int
    """How many of the likeliest tokens to name."""
    parts: list[LogprobColumns] = field(default_factory=list)
    """Log probabilities, some positions after the other."""
    finite: list[Tensor] = field(default_factory=list)
    """bool [] for each part, whether its logits are numbers."""

    def score(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        """Compute the tokens' log probabilities from the step's hidden states, some positions at a
        time."""
        chunk = rows_per_chunk(decoder.config.vocab_size)
        for start in range(0, len(self.targets), chunk):
            part, first = self.targets[start : start + chunk], self.first_token + start
            logits = decoder.compute_logits(hidden[first : first + len(part)])
            if not len(logits):  # they are gathered by another rank
                continue
            self.finite.append(results.fetch(torch.isfinite(logits.amax(dim=1)).all()))
            self.parts.append(LogprobColumns.of(logits, part, self.top).through(results.fetch))

    def answer(self) -> Answer:
        if not all(finite.item() for finite in self.finite):
            return Answer(self.sequence, error=NOT_NUMBERS)
        logprobs = [
            logprob for part in self.parts for logprob in part.rows([self.top] * len(part.tokens))
        ]
        return Answer(self.sequence, prompt_logprobs=tuple(logprobs))


class StepSamples(Protocol):
    """The samples of a step."""

    sequences: list[int]
    """The sequence at each of N positions that are sampled."""
    device_tokens: Tensor | None
    """int64 [N], sampled tokens on the device; None where the next step does not read them
    there."""

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        """Sample from the step's hidden states, and have what the answers need copied to the
        host."""

    def answers(self) -> Iterator[Answer]:
        """Answer for each row that was sampled, once the copies have arrived."""


@dataclass(slots=True)
class SampledRows:
    """The rows of a step that are sampled, at N positions together, with their tokens once they
    are. Here a row is sampled at one position, behind its last token."""

    sequences: list[int]
    states: Sequence[SamplingState]
    """The state of the sequence at each position."""
    last_tokens: Tensor | None
    """int64 [N], the place in the step of the token before each position; None where these are all
    tokens of the step, in their order."""
    settings: SamplingRows
    asked: Sequence[tuple[int, int]]
    """Positions, counted from 0 to N - 1, that want log probabilities, each with how many of the
    likeliest tokens to name."""
    asked_places: Tensor | None
    """int64 [number of these], if there are any."""
    greedy: bool
    """Whether each position takes the token of the largest logit, and nobody needs the others."""
    is_noted: bool
    """Whether a state takes note of its tokens: it has penalties or a grammar."""
    device_tokens: Tensor | None = None
    """int64 [N], on the device; None before they are sampled, and where another rank gathers the
    logits."""
    tokens: Tensor | None = None
    """int64 [N], on the host; None before they have arrived."""
    valid: Tensor | None = None
    """bool [N], on the host."""
    logprobs: LogprobColumns | None = None
    """Log probabilities of the positions that want them, on the host."""

    @classmethod
    def stage(
        cls,
        rows: Sequence[Row],
        ends: np.ndarray,
        states: Sequence[SamplingState],
        staging: Staging,
    ) -> "SampledRows | None":
        """Have what sampling needs moved to the device, for all rows of the step with their
        `row_ends` and states; None if no row is sampled."""
        starts = np.fromiter([row.start for row in rows], np.int64, len(rows))
        positions = starts + row_lengths(ends)
        sampled = [place for place, row in enumerate(rows) if row.sample]
        if not sampled:
            return None
        sequences = [row.sequence for row in rows]
        if len(sampled) == len(rows):
            # decode rows alone: no row is sampled without a token
            last_tokens = ends - 1 if len(rows) < ends[-1] else None
            return cls.at_positions(sequences, states, positions, last_tokens, staging)
        return cls.at_positions(
            sequences=[sequences[place] for place in sampled],
            states=[states[place] for place in sampled],
            positions=positions[sampled],
            last_tokens=ends[sampled] - 1,
            staging=staging,
        )

    @classmethod
    def at_positions(
        cls,
        sequences: list[int],
        states: Sequence[SamplingState],
        positions: Sequence[int] | np.ndarray,
        last_tokens: np.ndarray | None,
        staging: Staging,
    ) -> Self:
        """Stage N positions of sequences, with the sampling state and the place of the last token
        of each; no places where these are all tokens of the step."""
        settings = batch_settings(b"".join([state.settings for state in states]))
        asked_places = None
        if settings.asked:
            asked_places = staging.add(np.array([place for place, _ in settings.asked]))
        return cls(
            sequences=sequences,
            states=states,
            last_tokens=None if last_tokens is None else staging.add(last_tokens),
            settings=SamplingRows.of_settings(settings, states, positions, staging),
            asked=settings.asked,
            asked_places=asked_places,
            greedy=settings.takes_greediest,
            is_noted=settings.is_noted,
        )

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        """Sample from the logits of the step's hidden states, and have the tokens copied to the
        host."""
        if self.last_tokens is not None:
            hidden = hidden[self.last_tokens]
        if self.greedy and decoder.shard.degree > 1:  # no rank needs the logits of the others
            maxima, tokens = decoder.greediest(hidden)
            sampled = Sampled(tokens, torch.isfinite(maxima))
        else:
            logits = decoder.compute_logits(hidden)
            if not len(logits):  # another rank gathers them
                return
            sampled = sample(logits, self.settings)
        if not len(sampled.tokens):  # another rank samples
            return
        if self.asked_places is not None:
            places, most = self.asked_places, max(top for _, top in self.asked)
            columns = LogprobColumns.of(logits[places], sampled.tokens[places], most)
            self.logprobs = columns.through(results.fetch)
        self.device_tokens = sampled.tokens
        self.tokens, self.valid = results.fetch(sampled.tokens), results.fetch(sampled.valid)

    def answers(self) -> Iterator[Answer]:
        """Answer for each row; the states take note of the tokens."""
        if self.tokens is None or self.valid is None:
            return iter(())
        tokens, valid = self.tokens.tolist(), self.valid.tolist()
        if self.is_noted or self.logprobs is not None or not all(valid):
            return self._detailed_answers(tokens, valid)
        answered = zip(self.sequences, tokens, strict=True)
        return iter([Answer(sequence, (token,)) for sequence, token in answered])

    def _detailed_answers(self, tokens: list[int], valid: list[bool]) -> Iterator[Answer]:
        logprobs = self.known_logprobs()
        for place, (sequence, state) in enumerate(zip(self.sequences, self.states, strict=True)):
            if not valid[place]:
                yield Answer(sequence, error=NOT_NUMBERS)
                continue
            state.append(tokens[place])
            grammar = state.grammar
            if grammar is not None and grammar.error is not None:
                yield Answer(sequence, error=grammar.error)
                continue
            complete = grammar is not None and grammar.complete
            yield Answer(sequence, (tokens[place],), logprobs.get(place, ()), complete=complete)

    def known_logprobs(self) -> dict[int, tuple[TokenLogprob]]:
        """The log probabilities of the positions that want them, on the host, by position."""
        if self.logprobs is None:
            return {}
        found = self.logprobs.rows([top for _, top in self.asked])
        return {place: (logprob,) for (place, _), logprob in zip(self.asked, found, strict=True)}
