"""What comes of a step: sampled tokens and log probabilities, on the device, then on the host, then as answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.models.decoder import Decoder
from nanoserve.request import TokenLogprob
from nanoserve.runtime.sampling.sampler import SamplingRows, SamplingState, sample, top_tokens
from nanoserve.runtime.step.staging import DeviceToHostCopy, Staging
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


@dataclass(slots=True)
class SampledRows:
    """The N rows of a step that are sampled, with their tokens once they are."""

    sequences: list[int]
    states: list[SamplingState]
    last_tokens: Tensor
    """int64 [N], the place of each row's last token in the step."""
    settings: SamplingRows
    asked: list[tuple[int, int]]
    """Places of rows that want log probabilities, each with how many of the likeliest tokens to name."""
    asked_places: Tensor | None
    """int64 [number of these], if there are any."""
    tokens: Tensor | None = None
    """int64 [N], on the host; None before, and where another rank gathers the logits."""
    valid: Tensor | None = None
    """bool [N], on the host."""
    logprobs: LogprobColumns | None = None
    """Log probabilities of the rows that want them, on the host."""

    @classmethod
    def stage(
        cls, rows: Sequence[Row], ends: np.ndarray, states: Sequence[SamplingState], staging: Staging
    ) -> "SampledRows | None":
        """Have what sampling needs moved to the device, for all rows of the step with their `row_ends` and states; None
        if no row is sampled."""
        places = [place for place, row in enumerate(rows) if row.sample]
        if not places:
            return None
        states = [states[place] for place in places]
        asked = [(place, top) for place, state in enumerate(states) if (top := state.params.logprobs) is not None]
        positions = [rows[place].start + len(rows[place].tokens) for place in places]
        return cls(
            sequences=[rows[place].sequence for place in places],
            states=states,
            last_tokens=staging.add(ends[places] - 1),
            settings=SamplingRows.stage(states, positions, staging),
            asked=asked,
            asked_places=staging.add(np.array([place for place, _ in asked])) if asked else None,
        )

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> Tensor | None:
        """Sample from the logits of the step's hidden states; returns the tokens on the device."""
        logits = decoder.compute_logits(hidden[self.last_tokens])
        if not len(logits):  # they are gathered by another rank
            return None
        sampled = sample(logits, self.settings)
        if self.asked_places is not None:
            places, most = self.asked_places, max(top for _, top in self.asked)
            self.logprobs = LogprobColumns.of(logits[places], sampled.tokens[places], most).through(results.fetch)
        self.tokens, self.valid = results.fetch(sampled.tokens), results.fetch(sampled.valid)
        return sampled.tokens

    def answers(self) -> Iterator[Answer]:
        """One for each row; the states take note of the tokens."""
        if self.tokens is None or self.valid is None:
            return
        logprobs: dict[int, tuple[TokenLogprob]] = {}
        if self.logprobs is not None:
            found = self.logprobs.rows([top for _, top in self.asked])
            logprobs = {place: (logprob,) for (place, _), logprob in zip(self.asked, found, strict=True)}
        columns = zip(self.sequences, self.states, self.tokens.tolist(), self.valid.tolist(), strict=True)
        for place, (sequence, state, token, valid) in enumerate(columns):
            if valid:
                state.append(token)
            grammar = state.grammar
            error = None if grammar is None else grammar.error
            if error is not None or not valid:
                yield Answer(sequence, error=error or NOT_NUMBERS)
                continue
            complete = grammar is not None and grammar.complete
            yield Answer(sequence, (token,), logprobs.get(place, ()), complete=complete)
