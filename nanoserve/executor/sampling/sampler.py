"""From logits to tokens, for a whole batch at once.

Order of effects: logit bias, penalties and forbidden end tokens; what a grammar forbids; temperature; top_k; top_p
within what top_k left; min_p. From temperature on this is the order of Hugging Face. vLLM applies min_p before top_k
and top_p: there top_p is a share of what min_p left, so the two together may keep fewer tokens than here. Then the
Gumbel-max trick (Gumbel 1954), as a race of exponentials: the argmax of logit - log(noise) over the tokens kept is
distributed as their softmax.

Nothing sorts a vocabulary. What is kept and drawn for a row is a function of that row alone, so the same logits give
the same token alone, in a batch, and at any place in it. Ties: top_k prefers lower token ids; top_p without top_k keeps
all tokens that tie with the last one; greedy takes the lowest id.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.sampling.adjustments import AdjustmentRows, GrammarMask, SequenceGrammar, TokenAdjustments
from nanoserve.executor.step.staging import Staging
from nanoserve.scheduler.plan import Begin

_SETTINGS = np.dtype(
    [("temperature", "f4"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "i8"), ("index", "i8")]
)
# Probabilities are added as integers: 2^44 times a weight of at most 1, and 2^18 tokens fit into 63 bits.
_FIXED_POINT = 2.0**44
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MIX32_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_BELOW_ONE = 1.0 - 2.0**-24
_CACHED_LOGITS = 1 << 17
"""Logits that a CPU draws from at a time: numbers of 8 bytes for each, several times over, stay in its cache."""


class SamplingState:
    """The sampler's state of one sequence between its steps."""

    def __init__(self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None = None) -> None:
        params = self.params = begin.params
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        values = (params.temperature, top_k, params.top_p, params.min_p, begin.seed, begin.index)
        self.prompt_length = begin.prompt_length
        # As bytes: to put many together costs far less than to concatenate arrays of such a dtype.
        self.settings = np.array([values], _SETTINGS).tobytes()
        self.adjustments = TokenAdjustments(begin, vocab_size) if params.adjusts_logits else None
        self.grammar = grammar

    @property
    def takes_greediest(self) -> bool:
        """Whether nothing but the largest logit matters; the same on every rank, whose states have no grammars."""
        params = self.params
        greedy = params.temperature == 0 and not params.adjusts_logits
        return greedy and params.json_schema is None and params.logprobs is None

    def plain(self) -> "SamplingState":
        """How a drafter samples: with the same noise, without penalties and grammars."""
        plain = copy(self)
        plain.adjustments = plain.grammar = None
        return plain

    def append(self, token: int) -> None:
        """Note a sampled token."""
        if self.adjustments is not None:
            self.adjustments.append(token)
        if self.grammar is not None:
            self.grammar.append(token)

    def after(self, guesses: Sequence[int]) -> "SamplingState":
        """The state once these tokens are sampled; this one stays. Where a grammar forbids a guess, the state is that
        before it: what follows a token that cannot be sampled is never asked for."""
        if not guesses or (self.adjustments is None and self.grammar is None):
            return self
        later = copy(self)
        if self.grammar is not None:
            later.grammar, allowed = self.grammar.after(guesses)
            guesses = guesses[:allowed]
        if self.adjustments is not None:
            later.adjustments = self.adjustments.after(guesses)
        return later


@dataclass(frozen=True, slots=True)
class Draw:
    """G rows of the batch that are drawn in one way; all tensors are [G], on the device once they are transferred."""

    rows: Tensor
    seed: Tensor
    index: Tensor
    position: Tensor
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
    def stage(cls, settings: np.ndarray, positions: np.ndarray, rows: np.ndarray, staging: Staging) -> "Draw":
        """Have what the rows at these places are drawn with moved to the device."""
        chosen = settings[rows]
        columns = {name: staging.add(chosen[name].copy()) for name in _SETTINGS.names or ()}
        return cls(
            rows=staging.add(rows),
            position=staging.add(positions[rows]),
            largest_top_k=int(chosen["top_k"].max()),
            uses_top_p=bool((chosen["top_p"] < 1).any()),
            uses_min_p=bool((chosen["min_p"] > 0).any()),
            **columns,
        )

    def parts(self, most: int) -> Iterator["Draw"]:
        """Cut the draw into parts of at most this many rows: what is drawn for a row depends on that row alone."""
        names = ("rows", "position", *(_SETTINGS.names or ()))
        for columns in zip(*(getattr(self, name).split(most) for name in names), strict=True):
            yield replace(self, **dict(zip(names, columns, strict=True)))


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a batch of logits is sampled. Without anything the batch is plainly greedy."""

    draws: tuple[Draw, ...]
    adjustments: AdjustmentRows | None
    grammars: GrammarMask | None

    @classmethod
    def stage(cls, states: Sequence[SamplingState], positions: Sequence[int], staging: Staging) -> "SamplingRows":
        """Have the settings of a batch moved to the device, with the positions that its sampled tokens will have in
        their sequences; sample once they are transferred."""
        settings = np.frombuffer(b"".join([state.settings for state in states]), _SETTINGS)
        position = np.asarray(positions, np.int64)
        random = settings["temperature"] > 0
        by_top_k, by_top_p = settings["top_k"] > 0, settings["top_p"] < 1
        # A row's group depends on its own settings alone, and so does the way it is computed.
        groups = (random & by_top_k, random & ~by_top_k & by_top_p, random & ~by_top_k & ~by_top_p)
        draws = (Draw.stage(settings, position, np.flatnonzero(group), staging) for group in groups if group.any())
        adjusted = {row: state.adjustments for row, state in enumerate(states) if state.adjustments is not None}
        grammars = {row: state.grammar for row, state in enumerate(states) if state.grammar is not None}
        lengths = [place - state.prompt_length for place, state in zip(positions, states, strict=True)]
        return cls(
            draws=tuple(draws),
            adjustments=AdjustmentRows.stage(adjusted, lengths, staging) if adjusted else None,
            grammars=GrammarMask.stage(grammars, lengths, staging) if grammars else None,
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens: int64 [R]; valid: bool [R], False if logits are not numbers or no token was left (any token then)."""

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
    maxima, tokens = logits.max(dim=1)  # NaN wins a maximum, so the maxima alone tell what is valid
    most = rows_in_cache(logits)
    for draw in chain.from_iterable(whole.parts(most) for whole in rows.draws):
        scaled = (logits[draw.rows] - maxima[draw.rows, None]) / draw.temperature[:, None]
        values, ids = keep_likely(scaled, draw)
        keys = row_keys(draw.seed, draw.index, draw.position)
        winners = (values - exponential(keys, ids).log_()).argmax(dim=1, keepdim=True)
        tokens = tokens.index_copy(0, draw.rows, ids.expand_as(values).gather(1, winners)[:, 0])
    return Sampled(tokens, torch.isfinite(maxima))


def rows_in_cache(logits: Tensor) -> int:
    """How many rows of these logits, [N, V], to look at at a time: on a CPU as many as stay in its cache."""
    if logits.device.type == "cpu":
        return max(1, _CACHED_LOGITS // logits.shape[1])
    return max(1, len(logits))


def keep_likely(scaled: Tensor, draw: Draw) -> tuple[Tensor, Tensor]:
    """Apply top_k, top_p and min_p: what is left to draw from.

    scaled: logits over temperature, float32 [G, V], the largest 0. Returns K values per row [G, K], -inf where a token
    is dropped, and their token ids, [G, K] or [1, K].
    """
    if draw.largest_top_k:
        tokens = top_tokens(scaled, draw.largest_top_k)
        rank = torch.arange(tokens.shape[1], device=tokens.device)
        kept = scaled.gather(1, tokens).masked_fill(rank >= draw.top_k[:, None], -torch.inf)
    else:
        tokens = torch.arange(scaled.shape[1], device=scaled.device)[None]
        kept = scaled
    if draw.uses_top_p:
        kept = _apply_top_p(kept, draw.top_p[:, None], is_sorted=draw.largest_top_k > 0)
    if draw.uses_min_p:
        kept = kept.masked_fill(kept < draw.min_p[:, None].log().float(), -torch.inf)
    return kept, tokens


def _apply_top_p(scaled: Tensor, top_p: Tensor, *, is_sorted: bool) -> Tensor:
    weights = (scaled.exp().double() * _FIXED_POINT).long()
    total = weights.sum(1)
    needed = torch.minimum((top_p[:, 0] * total.double()).ceil().long(), total)
    if is_sorted:
        dropped = weights.cumsum(1) - weights >= needed[:, None]
    else:
        keys = order_keys(scaled)
        dropped = keys < smallest_sufficient_key(keys, weights, needed)[:, None]
    # A row without top_p keeps what weighs nothing too, whether or not another row of the group has one.
    return scaled.masked_fill(dropped & (top_p < 1), -torch.inf)


# ---- random numbers without a generator ----------------------------------------------------------------------
# Each is a hash of what it is for (seed, sample index, position, token id). The same request therefore draws the same
# numbers on every device, in every batch, at every place in it, and again after a preemption. Everything is integer
# tensor arithmetic that wraps around; `>>` keeps the sign, hence the masks.


def row_keys(seed: Tensor, index: Tensor, position: Tensor) -> Tensor:
    """Hash int64 [R] seeds, sample indices and positions into two words per row: int32 [R, 2]."""
    key = _mix64(seed + _signed(_GOLDEN_RATIO, 64))
    key = _mix64(key ^ index)
    key = _mix64(key + position * _signed(_GOLDEN_RATIO, 64))
    return torch.stack((key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF), dim=1).to(torch.int32)


def exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponentially distributed numbers of rate 1, float32 [R, K], for keys [R, 2] and token ids [R, K] or [1, K].

    Small ones are exact to a relative 2^-24 down to 2^-33: in a race it is the small ones that win, and a coarser grid
    would never draw the unlikely tokens of a large vocabulary.
    """
    hashed = _mix32(_mix32(tokens.to(torch.int32) ^ keys[:, :1]) ^ keys[:, 1:])
    high, low = ((hashed >> 16) & 0xFFFF).float(), (hashed & 0xFFFF).float()
    uniform = (high * 2.0**-16 + (low + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def _mix64(value: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value ^ _shift_right(value, 30, 64)) * _signed(_SPLITMIX_MULTIPLIERS[0], 64)
    value = (value ^ _shift_right(value, 27, 64)) * _signed(_SPLITMIX_MULTIPLIERS[1], 64)
    return value ^ _shift_right(value, 31, 64)


def _mix32(value: Tensor) -> Tensor:
    """A 32-bit bijection in which every input bit moves every output bit (xor-shift-multiply; Wellons 2018)."""
    value = (value ^ _shift_right(value, 16, 32)) * _signed(_MIX32_MULTIPLIERS[0], 32)
    value = (value ^ _shift_right(value, 15, 32)) * _signed(_MIX32_MULTIPLIERS[1], 32)
    return value ^ _shift_right(value, 16, 32)


def _shift_right(value: Tensor, count: int, width: int) -> Tensor:
    return (value >> count) & ((1 << (width - count)) - 1)


def _signed(value: int, width: int) -> int:
    """The two's complement integer with these bits, as a tensor of that width takes it."""
    return value - (1 << width) if value >> (width - 1) else value


_TOKEN_BITS = 20
_MAX_TOKEN = (1 << _TOKEN_BITS) - 1
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_SHIFTS = (22, 11, 0)  # three digits hold the 32 bits of a key


def order_keys(values: Tensor) -> Tensor:
    """Integers ordered as the float32 values are: int64 of the same shape, 0 to 2^32 - 1. NaN gets any of them."""
    bits = values.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)


def top_tokens(values: Tensor, count: int) -> Tensor:
    """The token ids of the `count` largest values of each row, best first, equal values by lower id.

    values: float32 [R, V], V at most 2^20; result int64 [R, min(count, V)].
    """
    tokens = torch.arange(values.shape[1], device=values.device)
    keys = (order_keys(values) << _TOKEN_BITS) | (_MAX_TOKEN - tokens)
    best = keys.topk(min(count, values.shape[1]), dim=1).values
    return _MAX_TOKEN - (best & _MAX_TOKEN)


def smallest_sufficient_key(keys: Tensor, weights: Tensor, needed: Tensor) -> Tensor:
    """The largest key such that everything at or above it weighs at least `needed`; found digit by digit, no sort.

    keys: int64 [R, V] from `order_keys`; weights: int64 [R, V], not negative; needed: int64 [R], 1 to the row's sum.
    Integer sums do not depend on the order of adding, so neither does the result: int64 [R]. A row whose arguments
    break these rules (its logits were NaN) gets some key, and never an index out of range.
    """
    prefix = torch.zeros_like(needed)
    for shift in _SHIFTS:
        in_prefix = (keys >> (shift + _DIGIT_BITS)) == prefix[:, None]
        digit = (keys >> shift) & (_DIGITS - 1)
        histogram = weights.new_zeros(keys.shape[0], _DIGITS).scatter_add_(1, digit, weights * in_prefix)
        at_or_above = histogram.flip(1).cumsum(1).flip(1)
        chosen = (at_or_above >= needed[:, None]).sum(1, keepdim=True).sub_(1).clamp_(min=0)
        above = at_or_above.gather(1, chosen) - histogram.gather(1, chosen)
        needed = needed - above[:, 0]
        prefix = (prefix << _DIGIT_BITS) | chosen[:, 0]
    return prefix
