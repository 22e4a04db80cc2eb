"""From logits to tokens, for a whole batch at once.

Order of effects: logit bias, penalties and forbidden end tokens; what a grammar forbids;
temperature; top_k; top_p within what top_k left; min_p. From temperature on this is the order of
Hugging Face. vLLM applies min_p before top_k and top_p: there top_p is a share of what min_p left,
so the two together may keep fewer tokens than here. What is kept is drawn from by an operator
(`triton_ops.sampling`).

Ties: top_k prefers lower token ids; top_p without top_k keeps all tokens that tie with the last
one; greedy takes the lowest id.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nanoserve.executor.sampling.adjustments import (
    AdjustmentRows,
    GrammarMask,
    SequenceGrammar,
    TokenAdjustments,
)
from nanoserve.executor.step.staging import Staging
from nanoserve.scheduler.plan import Begin
from triton_ops import draw_tokens, likeliest_tokens

_SETTINGS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("seed", "i8"),
        ("index", "i8"),
    ]
)
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class SamplingState:
    """The sampler's state of one sequence between its steps."""

    def __init__(
        self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None = None
    ) -> None:
        params = self.params = begin.params
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        values = (params.temperature, top_k, params.top_p, params.min_p, begin.seed, begin.index)
        self.prompt_length = begin.prompt_length
        # As bytes: to put many together costs far less than to concatenate arrays of such a dtype.
        self.settings = np.array([values], _SETTINGS).tobytes()
        self.adjustments = TokenAdjustments(begin, vocab_size) if params.adjusts_logits else None
        self.grammar = grammar
        greedy = params.temperature == 0 and not params.adjusts_logits
        self.takes_greediest = greedy and params.json_schema is None and params.logprobs is None
        """Whether nothing but the largest logit matters; the same on every rank, whose states have
        no grammars."""

    def plain(self) -> "SamplingState":
        """How a drafter samples: with the same noise, without penalties and grammars."""
        plain = copy(self)
        plain.adjustments = plain.grammar = None
        return plain

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """Hash positions, int64 [N], of the sequence as `row_keys` does -> int32 [N, 2]."""
        (settings,) = np.frombuffer(self.settings, _SETTINGS)
        seeds, indices = np.full_like(positions, settings["seed"]), settings["index"]
        return row_keys(seeds, np.full_like(positions, indices), positions)

    def append(self, token: int) -> None:
        """Note a sampled token."""
        if self.adjustments is not None:
            self.adjustments.append(token)
        if self.grammar is not None:
            self.grammar.append(token)

    def after(self, draft_tokens: Sequence[int]) -> "SamplingState":
        """The state once these tokens are sampled; this one stays. Where a grammar forbids a draft
        token, the state is that before it: what follows a token that cannot be sampled is never
        asked for."""
        if not draft_tokens or (self.adjustments is None and self.grammar is None):
            return self
        later = copy(self)
        if self.grammar is not None:
            later.grammar, allowed = self.grammar.after(draft_tokens)
            draft_tokens = draft_tokens[:allowed]
        if self.adjustments is not None:
            later.adjustments = self.adjustments.after(draft_tokens)
        return later


@dataclass(frozen=True, slots=True)
class Draw:
    """G rows of the batch that are drawn in one way; all tensors are on the device once they are
    transferred."""

    rows: Tensor
    """int64 [G], places in the batch."""
    keys: Tensor
    """int32 [G, 2], for `draw_tokens`."""
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    largest_top_k: int
    """Candidates to look at; 0 means the whole vocabulary, and then no row has a top_k."""
    uses_top_p: bool
    uses_min_p: bool
    """Whether a row of the group has a top_p below 1, or a min_p above 0."""

    @classmethod
    def stage(
        cls, settings: np.ndarray, positions: np.ndarray, rows: np.ndarray, staging: Staging
    ) -> "Draw":
        """Have what the rows at these places are drawn with moved to the device."""
        chosen = settings[rows]
        columns = {
            name: staging.add(chosen[name].copy())
            for name in ("temperature", "top_k", "top_p", "min_p")
        }
        return cls(
            rows=staging.add(rows),
            keys=staging.add(row_keys(chosen["seed"], chosen["index"], positions[rows])),
            largest_top_k=int(chosen["top_k"].max()),
            uses_top_p=bool((chosen["top_p"] < 1).any()),
            uses_min_p=bool((chosen["min_p"] > 0).any()),
            **columns,
        )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a batch of logits is sampled. Without anything the batch is plainly
    greedy."""

    draws: tuple[Draw, ...]
    adjustments: AdjustmentRows | None
    grammars: GrammarMask | None

    @classmethod
    def stage(
        cls, states: Sequence[SamplingState], positions: Sequence[int], staging: Staging
    ) -> "SamplingRows":
        """Have the settings of a batch moved to the device, with the positions that its sampled
        tokens will have in their sequences; sample once they are transferred."""
        settings = np.frombuffer(b"".join([state.settings for state in states]), _SETTINGS)
        position = np.asarray(positions, np.int64)
        random = settings["temperature"] > 0
        by_top_k, by_top_p = settings["top_k"] > 0, settings["top_p"] < 1
        # A row's group depends on its own settings alone, and so does the way it is computed.
        groups = (random & by_top_k, random & ~by_top_k & by_top_p, random & ~by_top_k & ~by_top_p)
        draws = (
            Draw.stage(settings, position, np.flatnonzero(group), staging)
            for group in groups
            if group.any()
        )
        adjusted = {
            row: state.adjustments
            for row, state in enumerate(states)
            if state.adjustments is not None
        }
        grammars = {
            row: state.grammar for row, state in enumerate(states) if state.grammar is not None
        }
        lengths = [
            place - state.prompt_length for place, state in zip(positions, states, strict=True)
        ]
        return cls(
            draws=tuple(draws),
            adjustments=AdjustmentRows.stage(adjusted, lengths, staging) if adjusted else None,
            grammars=GrammarMask.stage(grammars, lengths, staging) if grammars else None,
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [R]; valid: bool [R], False if logits are not numbers or no token was left (any
    token then)."""

    tokens: Tensor
    valid: Tensor


def sample(logits: Tensor, rows: SamplingRows) -> Sampled:
    """Sample one token for each row of logits, float32 [R, V], which stay as they are.

    Nothing here waits for the device: shapes never depend on what is in a tensor.
    """
    if rows.adjustments is not None:
        logits = rows.adjustments.apply(logits)
    if rows.grammars is not None:
        logits = rows.grammars.apply(logits)
    maxima, tokens, valid = likeliest_tokens(logits)
    for draw in rows.draws:
        drawn = draw_tokens(
            logits,
            maxima,
            draw.rows,
            draw.keys,
            draw.temperature,
            draw.top_k,
            draw.top_p,
            draw.min_p,
            largest_top_k=draw.largest_top_k,
            uses_top_p=draw.uses_top_p,
            uses_min_p=draw.uses_min_p,
        )
        # one way for the whole batch is the usual case: then its rows are in their order
        tokens = drawn if len(drawn) == len(tokens) else tokens.index_copy(0, draw.rows, drawn)
    return Sampled(tokens, valid)


def row_keys(seed: np.ndarray, index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Hash int64 [R] seeds, sample indices and positions into two words per row, int32 [R, 2].

    They make random numbers without a generator: each is a hash of what it is for (seed, sample
    index, position, token id). The same request therefore draws the same numbers on every device,
    in every batch, at every place in it, and again after a preemption.
    """
    key = _mix64(seed.astype(np.uint64) + _GOLDEN_RATIO)
    key = _mix64(key ^ index.astype(np.uint64))
    key = _mix64(key + position.astype(np.uint64) * _GOLDEN_RATIO)
    words = np.stack((key & np.uint64(0xFFFFFFFF), key >> np.uint64(32)), axis=1)
    return words.astype(np.uint32).view(np.int32)


def _mix64(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014); integers wrap around."""
    value = (value ^ (value >> np.uint64(30))) * _SPLITMIX_MULTIPLIERS[0]
    value = (value ^ (value >> np.uint64(27))) * _SPLITMIX_MULTIPLIERS[1]
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
