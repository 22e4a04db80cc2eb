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
from functools import lru_cache

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

_GREEDY, _BY_TOP_K, _BY_TOP_P, _BY_TEMPERATURE = range(4)
_DRAWS = (_BY_TOP_K, _BY_TOP_P, _BY_TEMPERATURE)
_NO_LOGPROBS = -1
_SETTINGS = np.dtype(
    [
        ("temperature", "f4"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("key", "u8"),  # of the seed and the sample's index
        ("prompt_length", "i8"),
        ("logprobs", "i8"),  # how many of the likeliest tokens to name, or _NO_LOGPROBS
        ("draw", "i1"),  # one of _GREEDY and _DRAWS
        ("adjusts", "?"),
        ("has_grammar", "?"),
        ("takes_greediest", "?"),
    ]
)
"""The settings of a sequence. A batch is looked at as columns of these, so that a row costs nothing
for what none of them uses."""
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class SamplingState:
    """The sampler's state of one sequence between its steps."""

    def __init__(
        self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None = None
    ) -> None:
        params = self.params = begin.params
        self.adjustments = TokenAdjustments(begin, vocab_size) if params.adjusts_logits else None
        self.grammar = grammar
        greedy = params.temperature == 0 and not params.adjusts_logits
        self.takes_greediest = greedy and params.json_schema is None and params.logprobs is None
        """Whether nothing but the largest logit matters; the same on every rank, whose states have
        no grammars."""
        # As bytes: to put many together costs far less than to concatenate arrays of such a dtype.
        self.settings = self._settings(begin, vocab_size).tobytes()

    def _settings(self, begin: Begin, vocab_size: int) -> np.ndarray:
        params = begin.params
        settings = np.zeros(1, _SETTINGS)
        settings["temperature"] = params.temperature
        settings["top_k"] = params.top_k if 0 < params.top_k < vocab_size else 0
        settings["top_p"], settings["min_p"] = params.top_p, params.min_p
        settings["key"] = sequence_keys(np.array([begin.seed]), np.array([begin.index]))
        settings["prompt_length"] = begin.prompt_length
        settings["logprobs"] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        # A row's way depends on its own settings alone, and so does how it is computed.
        if params.temperature == 0:
            settings["draw"] = _GREEDY
        elif settings["top_k"] > 0:
            settings["draw"] = _BY_TOP_K
        elif params.top_p < 1:
            settings["draw"] = _BY_TOP_P
        else:
            settings["draw"] = _BY_TEMPERATURE
        settings["adjusts"] = self.adjustments is not None
        settings["has_grammar"] = self.grammar is not None
        settings["takes_greediest"] = self.takes_greediest
        return settings

    def plain(self) -> "SamplingState":
        """How a drafter samples: with the same noise, without penalties and grammars."""
        plain = copy(self)
        plain.adjustments = plain.grammar = None
        settings = np.frombuffer(self.settings, _SETTINGS).copy()
        settings["adjusts"] = settings["has_grammar"] = False
        plain.settings = settings.tobytes()
        return plain

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """Hash positions, int64 [N], of the sequence -> int32 [N, 2]."""
        (settings,) = np.frombuffer(self.settings, _SETTINGS)
        return position_keys(np.full(positions.shape, settings["key"]), positions)

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
class DrawnRows:
    """The settings of G rows of a batch that are drawn in one way, as columns."""

    rows: np.ndarray
    """int64 [G], places in the batch."""
    keys: np.ndarray
    """uint64 [G], as of `sequence_keys`."""
    columns: dict[str, np.ndarray]
    """The Draw's tensors that are settings: temperature, top_k, top_p, min_p."""
    largest_top_k: int
    uses_top_p: bool
    uses_min_p: bool


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The settings of a batch of R rows, put together. They stay as they are as long as the same
    sequences go on."""

    drawn: tuple[DrawnRows, ...]
    prompt_lengths: np.ndarray
    """int64 [R]."""
    asked: tuple[tuple[int, int], ...]
    """Rows that want log probabilities, each with how many of the likeliest tokens to name."""
    takes_greediest: bool
    """Whether that is so for each row's state."""
    is_noted: bool
    """Whether a state takes note of its tokens: it has penalties or a grammar."""


@lru_cache(maxsize=8)  # some batches take turns: a model's, a drafter's
def batch_settings(packed: bytes) -> BatchSettings:
    """Put together the settings of a batch: those of its states, one after another."""
    settings = np.frombuffer(packed, _SETTINGS)
    drawn = list[DrawnRows]()
    for way in _DRAWS:
        rows = np.flatnonzero(settings["draw"] == way)
        if len(rows) == 0:
            continue
        chosen = settings[rows]
        columns = {name: chosen[name].copy() for name in ("temperature", "top_k", "top_p", "min_p")}
        drawn.append(
            DrawnRows(
                rows,
                chosen["key"].copy(),
                columns,
                largest_top_k=int(columns["top_k"].max()),
                uses_top_p=bool((columns["top_p"] < 1).any()),
                uses_min_p=bool((columns["min_p"] > 0).any()),
            )
        )
    tops = settings["logprobs"].tolist()
    return BatchSettings(
        tuple(drawn),
        settings["prompt_length"].copy(),
        asked=tuple((row, top) for row, top in enumerate(tops) if top != _NO_LOGPROBS),
        takes_greediest=bool(settings["takes_greediest"].all()),
        is_noted=bool(settings["adjusts"].any() or settings["has_grammar"].any()),
    )


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
    def stage(cls, drawn: DrawnRows, positions: np.ndarray, staging: Staging) -> "Draw":
        """Have what these rows are drawn with moved to the device."""
        settings = drawn.columns
        rows, temperature, top_k, top_p, min_p = staging.add_fixed(
            drawn,
            (
                drawn.rows,
                settings["temperature"],
                settings["top_k"],
                settings["top_p"],
                settings["min_p"],
            ),
        )
        return cls(
            rows=rows,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            keys=staging.add(position_keys(drawn.keys, positions[drawn.rows])),
            largest_top_k=drawn.largest_top_k,
            uses_top_p=drawn.uses_top_p,
            uses_min_p=drawn.uses_min_p,
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
        cls,
        states: Sequence[SamplingState],
        positions: Sequence[int] | np.ndarray,
        staging: Staging,
    ) -> "SamplingRows":
        """Have the settings of a batch moved to the device, with the positions that its sampled
        tokens will have in their sequences; sample once they are transferred."""
        settings = batch_settings(b"".join([state.settings for state in states]))
        return cls.of_settings(settings, states, positions, staging)

    @classmethod
    def of_settings(
        cls,
        settings: BatchSettings,
        states: Sequence[SamplingState],
        positions: Sequence[int] | np.ndarray,
        staging: Staging,
    ) -> "SamplingRows":
        """Stage a batch as `stage` does, whose settings are known."""
        places = np.asarray(positions, np.int64)
        draws = tuple([Draw.stage(drawn, places, staging) for drawn in settings.drawn])
        if not settings.is_noted:
            return cls(draws, None, None)
        lengths = (places - settings.prompt_lengths).tolist()
        adjusted = {
            row: state.adjustments
            for row, state in enumerate(states)
            if state.adjustments is not None
        }
        grammars = {
            row: state.grammar for row, state in enumerate(states) if state.grammar is not None
        }
        return cls(
            draws,
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


def sequence_keys(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Hash int64 [R] seeds and sample indices -> uint64 [R], once for each sequence.

    With `position_keys` they make random numbers without a generator: each is a hash of what it is
    for (seed, sample index, position, token id). The same request therefore draws the same numbers
    on every device, in every batch, at every place in it, and again after a preemption.
    """
    key = _mix64(seed.astype(np.uint64) + _GOLDEN_RATIO)
    return _mix64(key ^ index.astype(np.uint64))


def position_keys(key: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Hash `sequence_keys` and int64 [R] positions into two words per row, int32 [R, 2], the lower
    one first."""
    mixed = _mix64(key + position.astype(np.uint64) * _GOLDEN_RATIO)
    return mixed.astype("<u8").view("<i4").reshape(-1, 2)


def _mix64(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014); integers wrap around."""
    value = (value ^ (value >> np.uint64(30))) * _SPLITMIX_MULTIPLIERS[0]
    value = (value ^ (value >> np.uint64(27))) * _SPLITMIX_MULTIPLIERS[1]
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
