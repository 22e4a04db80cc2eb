"""Picking the largest of a row without sorting it, ties included: the result is a function of the row alone.

Logits from bfloat16 tie often. `torch.topk` breaks ties as it likes, differently per device and per k, so the same
request would see other candidates in another batch; here a choice is by value and then lower token id, or by value with
all its ties.
"""

import torch
from torch import Tensor

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
