"""What comes of a step: sampled tokens and log probabilities, on the device, then on the host, then as answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.sampling.sampler import Sampled, SamplingRows, SamplingState, rows_in_cache, sample, top_tokens
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder
from nanoserve.request import TokenLogprob
from nanoserve.scheduler.plan import Answer, Row

NOT_NUMBERS = "the model's logits are not numbers (NaN or infinite), or no token was left to sample"
ELEMENTS_PER_CHUNK = 1 << 24


def rows_per_chunk(vocab_size: int) -> int:
    """How many positions' logits to hold at once, so that a long prompt of a large vocabulary still fits: 64 MiB."""
    return max(1, ELEMENTS_PER_CHUNK // vocab_size)


class LogprobColumns(NamedTuple):
    """What raw logits say of N tokens, as tensors that may still be on the device."""

    tokens: Tensor
    ranks: Tensor
    """int64 [N]."""
    logprobs: Tensor
    """float32 [N]; of logits that are not numbers, anything."""
    best: Tensor
    """int64 [N, K], the likeliest tokens."""
    best_logprobs: Tensor
    """float32 [N, K]."""

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, most: int) -> "LogprobColumns":
        """The columns of logits, float32 [N, V], with the `most` likeliest tokens of each row; waits for nothing."""
        at_a_time = rows_in_cache(logits)
        pieces = [slice(start, start + at_a_time) for start in range(0, len(logits), at_a_time)]
        parts = [cls._of_rows(logits[rows], tokens[rows], most) for rows in pieces]
        if len(parts) == 1:
            return parts[0]
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @classmethod
    def _of_rows(cls, logits: Tensor, tokens: Tensor, most: int) -> "LogprobColumns":
        normalizer = logits.logsumexp(dim=1, keepdim=True)
        chosen = logits.gather(1, tokens[:, None])
        best = top_tokens(logits, most) if most else tokens[:, None][:, :0]
        return cls(
            tokens=tokens,
            logprobs=(chosen - normalizer)[:, 0],
            ranks=(logits > chosen).sum(1) + 1,
            best=best,
            best_logprobs=logits.gather(1, best) - normalizer,
        )

    def through(self, move: Callable[[Tensor], Tensor]) -> "LogprobColumns":
        return LogprobColumns(*map(move, self))

    def rows(self, tops: Sequence[int]) -> Iterator[TokenLogprob]:
        """One by one, on the host. tops: how many of the likeliest tokens to name for each."""
        columns = [column.tolist() for column in self]
        for token, rank, logprob, ids, values, top in zip(*columns, tops, strict=True):
            yield TokenLogprob(token, logprob, rank, tuple(zip(ids[:top], values[:top], strict=True)))


@dataclass(slots=True)
class ScoredPrompt:
    """The L prompt tokens that one row's logits predict, with their log probabilities once they are scored."""

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
        """Compute the tokens' log probabilities from the step's hidden states, some positions at a time."""
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
        logprobs = [logprob for part in self.parts for logprob in part.rows([self.top] * len(part.tokens))]
        return Answer(self.sequence, prompt_logprobs=tuple(logprobs))


class SampledRow(NamedTuple):
    """A row of a step that is sampled, behind its last known token and behind each of its guesses."""

    sequence: int
    state: SamplingState
    guesses: tuple[int, ...]


@dataclass(slots=True)
class SampledRows:
    """The rows of a step that are sampled at N positions together, with their tokens once they are."""

    rows: list[SampledRow]
    last_tokens: Tensor
    """int64 [N], the place in the step of the token before each position."""
    settings: SamplingRows
    asked: list[tuple[int, int]]
    """Positions, counted from 0 to N - 1, that want log probabilities, each with how many of the likeliest tokens to
    name."""
    asked_places: Tensor | None
    """int64 [number of these], if there are any."""
    greedy: bool
    """Whether each position takes the token of the largest logit, and nobody needs the others."""
    tokens: Tensor | None = None
    """int64 [N], on the host; None before, and where another rank gathers the logits."""
    valid: Tensor | None = None
    """bool [N], on the host."""
    logprobs: LogprobColumns | None = None
    """Log probabilities of the positions that want them, on the host."""

    @classmethod
    def stage(
        cls, rows: Sequence[Row], ends: np.ndarray, states: Sequence[SamplingState], staging: Staging
    ) -> "SampledRows | None":
        """Have what sampling needs moved to the device, for all rows of the step with their `row_ends` and states; None
        if no row is sampled."""
        sampled = list[SampledRow]()
        states_there, positions, last_tokens = list[SamplingState](), list[int](), list[int]()
        for row, state, end in zip(rows, states, ends.tolist(), strict=True):
            if not row.sample:
                continue
            first = len(row.tokens) - row.guesses
            guesses = row.tokens[first:]
            sampled.append(SampledRow(row.sequence, state, guesses))
            for count in range(row.guesses + 1):
                states_there.append(state.after(guesses[:count]))
                positions.append(row.start + first + count)
                last_tokens.append(end - 1 - row.guesses + count)
        if not sampled:
            return None
        tops = [state.params.logprobs for state in states_there]
        asked = [(place, top) for place, top in enumerate(tops) if top is not None]
        return cls(
            rows=sampled,
            last_tokens=staging.add(np.array(last_tokens)),
            settings=SamplingRows.stage(states_there, positions, staging),
            asked=asked,
            asked_places=staging.add(np.array([place for place, _ in asked])) if asked else None,
            greedy=all(state.takes_greediest for state in states_there),
        )

    @property
    def sequences(self) -> list[int]:
        """The sequence of each position."""
        return [row.sequence for row in self.rows for _ in range(len(row.guesses) + 1)]

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> Tensor | None:
        """Sample from the logits of the step's hidden states; returns the tokens on the device."""
        hidden = hidden[self.last_tokens]
        if self.greedy and decoder.shard.degree > 1:  # no rank needs the logits of the others
            maxima, tokens = decoder.greediest(hidden)
            sampled = Sampled(tokens, torch.isfinite(maxima))
        else:
            logits = decoder.compute_logits(hidden)
            if not len(logits):  # another rank gathers them
                return None
            sampled = sample(logits, self.settings)
        if not len(sampled.tokens):  # another rank samples
            return None
        if self.asked_places is not None:
            places, most = self.asked_places, max(top for _, top in self.asked)
            self.logprobs = LogprobColumns.of(logits[places], sampled.tokens[places], most).through(results.fetch)
        self.tokens, self.valid = results.fetch(sampled.tokens), results.fetch(sampled.valid)
        return sampled.tokens

    def answers(self) -> Iterator[Answer]:
        """One for each row; the states take note of the tokens."""
        if self.tokens is None or self.valid is None:
            return
        logprobs: dict[int, TokenLogprob] = {}
        if self.logprobs is not None:
            found = self.logprobs.rows([top for _, top in self.asked])
            logprobs = {place: logprob for (place, _), logprob in zip(self.asked, found, strict=True)}
        first, tokens, valid = 0, self.tokens.tolist(), self.valid.tolist()
        for row in self.rows:
            grammar, taken, error = row.state.grammar, list[int](), None
            for place, guess in enumerate((*row.guesses, None), start=first):
                if valid[place]:
                    row.state.append(tokens[place])
                error = None if grammar is None else grammar.error
                if error is not None or not valid[place]:
                    break  # after the tokens before, it is the next step's
                taken.append(tokens[place])
                if taken[-1] != guess or (grammar is not None and grammar.complete):
                    break
            if taken:
                known = [logprobs[place] for place in range(first, first + len(taken)) if place in logprobs]
                complete = grammar is not None and grammar.complete
                yield Answer(row.sequence, tuple(taken), tuple(known), complete=complete)
            else:
                yield Answer(row.sequence, error=error or NOT_NUMBERS)
            first += len(row.guesses) + 1
