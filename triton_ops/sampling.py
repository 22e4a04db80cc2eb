"""Drawing a token for each row of logits, and log probabilities, without sorting a vocabulary.

Here in tensor operations that never wait for a device: shapes depend on no tensor's content. What
is drawn for a row is a function of that row alone, so the same logits give the same token alone, in
a batch, and at any place in it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from triton_ops.registration import OPERATORS

# Probabilities are added as integers: 2^44 times a weight of at most 1, and 2^18 tokens fit into 63
# bits.
_FIXED_POINT = 2.0**44
_MIX32_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # as int32 takes them
_BELOW_ONE = 1.0 - 2.0**-24
_CACHED_LOGITS = 1 << 17
"""Logits that a CPU looks at together: numbers of 8 bytes for each, several times over, stay in its
cache."""
_TOKEN_BITS = 20
_MAX_TOKEN = (1 << _TOKEN_BITS) - 1
_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS
_SHIFTS = (22, 11, 0)  # three digits hold the 32 bits of a key


def _fake_draw_tokens(
    logits: Tensor, maxima: Tensor, rows: Tensor, *settings: Tensor, **used: object
) -> Tensor:
    return torch.empty_like(rows)


@OPERATORS.define(fake=_fake_draw_tokens)
def draw_tokens(
    logits: Tensor,
    maxima: Tensor,
    rows: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    largest_top_k: int,
    uses_top_p: bool,
    uses_min_p: bool,
) -> Tensor:
    """Draw a token from each of G rows of logits that are drawn in one way -> int64 [G].

    The Gumbel-max trick (Gumbel 1954), as a race of exponentials: the argmax of logit - log(noise)
    over the tokens kept is distributed as their softmax. A row whose maximum is not finite gets any
    token.

    logits: of 16 or 32 bits [R, V], with `maxima`, float32 [R]; rows: int64 [G], places in the
    batch; keys: int32 [G, 2] for the noise; temperature: float32 [G], above 0; top_k: int64 [G];
    top_p, min_p: float64 [G]; `largest_top_k` is 0 if no row has a top_k, and `uses_top_p` and
    `uses_min_p` tell whether one has a top_p below 1 or a min_p above 0.
    """
    tokens = list[Tensor]()
    for part in _pieces(len(rows), logits):
        settings = keys[part], temperature[part], top_k[part], top_p[part], min_p[part]
        perturbed, ids = perturb_likely(
            logits,
            maxima,
            rows[part],
            *settings,
            largest_top_k=largest_top_k,
            uses_top_p=uses_top_p,
            uses_min_p=uses_min_p,
        )
        winners = perturbed.argmax(dim=1, keepdim=True)
        tokens.append(ids.expand_as(perturbed).gather(1, winners)[:, 0])
    return torch.cat(tokens) if tokens else torch.empty_like(rows)


def perturb_likely(
    logits: Tensor,
    maxima: Tensor,
    rows: Tensor,
    keys: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    largest_top_k: int,
    uses_top_p: bool,
    uses_min_p: bool,
) -> tuple[Tensor, Tensor]:
    """Add Gumbel noise to the logits that are left to draw from, with the arguments of
    `draw_tokens`. Returns K values per row [G, K], of which the largest is drawn, and their token
    ids, [G, K] or [1, K]."""
    scaled = (logits[rows] - maxima[rows, None]) / temperature[:, None]
    values, ids = keep_likely(
        scaled, top_k, top_p, min_p, largest_top_k, uses_top_p=uses_top_p, uses_min_p=uses_min_p
    )
    return values - exponential(keys, ids).log_(), ids


def _fake_likeliest_tokens(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(logits)
    tokens, finite = (logits.new_empty(rows, dtype=dtype) for dtype in (torch.int64, torch.bool))
    return logits.new_empty(rows, dtype=torch.float32), tokens, finite


@OPERATORS.define(fake=_fake_likeliest_tokens)
def likeliest_tokens(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the largest logit of each row of logits, of 16 or 32 bits [R, V] -> that logit, float32
    [R]; the lowest token that has it, int64 [R]; and whether it is finite, bool [R]. NaN is larger
    than all numbers, so this tells of every row with a NaN."""
    largest, tokens = logits.max(dim=1)
    maxima = largest.float()
    return maxima, tokens, maxima.abs() < torch.inf  # fewer operators than isfinite


def _fake_allow_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
    return torch.empty_like(logits)


@OPERATORS.define(fake=_fake_allow_tokens)
def allow_tokens(logits: Tensor, rows: Tensor, allowed: Tensor) -> Tensor:
    """Copy logits, float32 [R, V], with -inf for what may not come.

    rows: int64 [G], places in the batch; allowed: uint8 [G, ceil(V / 8)], a bit for each token, the
    lowest first.
    """
    each = (allowed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
    forbidden = each.flatten(1)[:, : logits.shape[1]] == 0
    return logits.index_copy(0, rows, logits[rows].masked_fill(forbidden, -torch.inf))


def _fake_token_logprobs(
    logits: Tensor, tokens: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = min(most, logits.shape[1])
    return (
        logits.new_empty(len(tokens)),
        torch.empty_like(tokens),
        tokens.new_empty(len(tokens), count),
        logits.new_empty(len(tokens), count),
    )


@OPERATORS.define(fake=_fake_token_logprobs)
def token_logprobs(
    logits: Tensor, tokens: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tell what logits, float32 [N, V], say of tokens, int64 [N]: their log probabilities, float32
    [N], and ranks from 1, int64 [N]; then the K = min(most, V) likeliest tokens, best first, int64
    [N, K], and theirs, float32 [N, K].

    Of a row whose maximum is not finite they may be anything.
    """
    rows = [
        _logprobs_of_rows(logits[part], tokens[part], most) for part in _pieces(len(tokens), logits)
    ]
    if not rows:
        return _fake_token_logprobs(logits, tokens, most)
    logprobs, ranks, best, best_logprobs = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return logprobs, ranks, best, best_logprobs


def _logprobs_of_rows(
    logits: Tensor, tokens: Tensor, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    best = top_tokens(logits, most) if most else tokens[:, None][:, :0]
    ranks = (logits > chosen).sum(1) + 1
    return (chosen - normalizer)[:, 0], ranks, best, logits.gather(1, best) - normalizer


def _pieces(count: int, logits: Tensor) -> Iterator[slice]:
    """Cut `count` rows into those that are looked at together: on a CPU as many as stay in its
    cache."""
    at_a_time = (
        max(1, _CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else max(1, count)
    )
    return (slice(start, start + at_a_time) for start in range(0, count, at_a_time))


def keep_likely(
    scaled: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    largest_top_k: int,
    *,
    uses_top_p: bool,
    uses_min_p: bool,
) -> tuple[Tensor, Tensor]:
    """Apply top_k, top_p and min_p: what is left to draw from.

    scaled: logits over temperature, float32 [G, V], the largest 0. Returns K values per row [G, K],
    -inf where a token is dropped, and their token ids, [G, K] or [1, K].
    """
    if largest_top_k:
        tokens = top_tokens(scaled, largest_top_k)
        rank = torch.arange(tokens.shape[1], device=tokens.device)
        kept = scaled.gather(1, tokens).masked_fill(rank >= top_k[:, None], -torch.inf)
    else:
        tokens = torch.arange(scaled.shape[1], device=scaled.device)[None]
        kept = scaled
    if uses_top_p:
        kept = _apply_top_p(kept, top_p[:, None], is_sorted=largest_top_k > 0)
    if uses_min_p:
        kept = kept.masked_fill(kept < min_p[:, None].log().float(), -torch.inf)
    return kept, tokens


def _apply_top_p(scaled: Tensor, top_p: Tensor, *, is_sorted: bool) -> Tensor:
    weights = (scaled.exp().double() * _FIXED_POINT).long()
    if is_sorted:
        needed = needed_weight(weights.sum(1), top_p[:, 0])
        dropped = weights.cumsum(1) - weights >= needed[:, None]
    else:
        keys = order_keys(scaled)
        dropped = keys < smallest_sufficient_key(keys, weights, top_p[:, 0])[:, None]
    # A row without top_p keeps what weighs nothing too, whether or not another row of the group has
    # one.
    return scaled.masked_fill(dropped & (top_p < 1), -torch.inf)


def needed_weight(total: Tensor, share: Tensor) -> Tensor:
    """The least weight that is a share, float64 [R], of a total, int64 [R]: int64 [R]."""
    return torch.minimum((share * total.double()).ceil().long(), total)


def exponential(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponentially distributed numbers of rate 1, float32 [R, K], for keys [R, 2] and token ids
    [R, K] or [1, K].

    Small ones are exact to a relative 2^-24 down to 2^-33: in a race it is the small ones that win,
    and a coarser grid would never draw the unlikely tokens of a large vocabulary.
    """
    hashed = _mix32(_mix32(tokens.to(torch.int32) ^ keys[:, :1]) ^ keys[:, 1:])
    high, low = ((hashed >> 16) & 0xFFFF).float(), (hashed & 0xFFFF).float()
    uniform = (high * 2.0**-16 + (low + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def _mix32(value: Tensor) -> Tensor:
    """A 32-bit bijection in which every input bit moves every output bit (xor-shift-multiply;
    Wellons 2018)."""
    value = (value ^ _shift_right(value, 16)) * _MIX32_MULTIPLIERS[0]
    value = (value ^ _shift_right(value, 15)) * _MIX32_MULTIPLIERS[1]
    return value ^ _shift_right(value, 16)


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Shift int32 as if it had no sign."""
    return (value >> count) & ((1 << (32 - count)) - 1)


def order_keys(values: Tensor) -> Tensor:
    """Integers ordered as the float32 values are: int64 of the same shape, 0 to 2^32 - 1. NaN gets
    any of them."""
    bits = values.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + (1 << 31)


def top_tokens(values: Tensor, count: int) -> Tensor:
    """The token ids of the `count` largest values of each row, best first, equal values by lower
    id.

    values: float32 [R, V], V at most 2^20; result int64 [R, min(count, V)].
    """
    tokens = torch.arange(values.shape[1], device=values.device)
    keys = (order_keys(values) << _TOKEN_BITS) | (_MAX_TOKEN - tokens)
    best = keys.topk(min(count, values.shape[1]), dim=1).values
    return _MAX_TOKEN - (best & _MAX_TOKEN)


def smallest_sufficient_key(keys: Tensor, weights: Tensor, share: Tensor) -> Tensor:
    """The largest key such that everything at or above it weighs at least a share of the whole;
    found digit by digit, no sort.

    keys: int64 [R, V] from `order_keys`; weights: int64 [R, V], not negative; share: float64 [R],
    above 0 and at most 1. Integer sums do not depend on the order of adding, so neither does the
    result: int64 [R]. A row whose arguments break these rules (its logits were NaN) gets some key,
    and never an index out of range.
    """
    needed: Tensor | None = None
    prefix = keys.new_zeros(len(keys))
    for shift in _SHIFTS:
        in_prefix = (keys >> (shift + _DIGIT_BITS)) == prefix[:, None]
        digit = (keys >> shift) & (_DIGITS - 1)
        histogram = weights.new_zeros(keys.shape[0], _DIGITS).scatter_add_(
            1, digit, weights * in_prefix
        )
        at_or_above = histogram.flip(1).cumsum(1).flip(1)
        if needed is None:  # the first digit's histogram has every token
            needed = needed_weight(at_or_above[:, 0], share)
        chosen = (at_or_above >= needed[:, None]).sum(1, keepdim=True).sub_(1).clamp_(min=0)
        above = at_or_above.gather(1, chosen) - histogram.gather(1, chosen)
        needed = needed - above[:, 0]
        prefix = (prefix << _DIGIT_BITS) | chosen[:, 0]
    return prefix
