"""Sampling: the largest logit of each row, the least one that top_p keeps, and a token drawn.

A row's vocabulary is cut into pieces, which different programs read at the same time. The last
program of a row to arrive concludes from what all of them have found. Whatever they find is an
integer, a maximum or a sum, so a row's token depends neither on the other rows nor on the cuts.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

_LARGEST_INT, _SIGN = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x80000000)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_FIXED_POINT = tl.constexpr(2.0**44)
"""A weight of 1 as an integer, as in `triton_ops.sampling`."""
_LOW = tl.constexpr(-12.0)
"""Scaled logits up to here are low: hundreds of thousands of them weigh little, unless all are. The
first digit of a key tells whether one is."""
_MIX_FIRST, _MIX_SECOND = tl.constexpr(0x7FEB352D), tl.constexpr(0x846CA68B)


@triton.jit
def _ordered(value):
    """Return int32 that are ordered as float32 values are."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LARGEST_INT)


@triton.jit
def _number(ordered):
    """Return the float32 value of `_ordered`."""
    return (ordered ^ ((ordered >> 31) & _LARGEST_INT)).to(tl.float32, bitcast=True)


@triton.jit
def _packed(value, token):
    """Return float32 values and their tokens as int64: ordered by value, NaN largest, and among
    equal values the lowest token largest."""
    key = _ordered(value + 0.0)  # no negative zero is left
    key = tl.where(value != value, _LARGEST_INT, key)
    return (key.to(tl.int64) << 32) | (token ^ _LARGEST_INT).to(tl.int64)


@triton.jit
def _token_of(packed):
    """Return the token of `_packed`, int64."""
    return (packed & _LARGEST_INT) ^ _LARGEST_INT


@triton.jit
def _value_of(packed):
    """Return the value of `_packed`, float32."""
    return _number((packed >> 32).to(tl.int32))


@triton.jit
def _mix(value):
    """Compute `triton_ops.sampling._mix32` of uint32."""
    value = (value ^ (value >> 16)) * _MIX_FIRST
    value = (value ^ (value >> 15)) * _MIX_SECOND
    return value ^ (value >> 16)


@triton.jit
def _log_of_exponential(tokens, first_key, second_key):
    """Compute the logarithm of `triton_ops.sampling.exponential` for tokens, int32, and the two
    words of a key, with the same roundings."""
    hashed = _mix(_mix(tokens.to(tl.uint32) ^ first_key) ^ second_key)
    high, low = (hashed >> 16).to(tl.float32), (hashed & 0xFFFF).to(tl.float32)
    uniform = tl.minimum(high * 2.0**-16 + (low + 0.5) * 2.0**-32, _BELOW_ONE)
    return libdevice.log(-libdevice.log1p(-uniform))


@triton.jit
def _quotient(numerator, denominator, inverse):
    """Divide, rounding correctly, with the rounded inverse of the denominator (Markstein 1990).
    Minus infinity gives NaN."""
    estimate = numerator * inverse
    return tl.fma(tl.fma(-estimate, denominator, numerator), inverse, estimate)


@triton.jit
def _scaled(logits, place, vocab_size, maximum, degrees, inverse):
    """Return logits less the largest, over the temperature; NaN for those of minus infinity and
    behind the vocabulary."""
    logit = tl.load(logits + place, mask=place < vocab_size, other=float("-inf")).to(tl.float32)
    return _quotient(logit - maximum, degrees, inverse)


@triton.jit
def _inverse(degrees):
    """Return the rounded inverse of a temperature, a finite number."""
    return tl.minimum(tl.div_rn(1.0, degrees), _LARGEST_FLOAT)


@triton.jit
def _is_last_of_row(arrivals, row):
    """Count this program of a row, whose stores are done, and return whether it is the row's last.

    `arrivals` is zero before and after a launch. A row with one program does not use it.
    """
    pieces = tl.num_programs(1)
    is_last = pieces == 1
    if pieces > 1:
        # All threads have stored before one of them counts. The count releases what is stored, and
        # acquires what was released by those who counted before.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
        is_last = arrived == pieces - 1
        if is_last:
            tl.store(arrivals + row, 0)
    return is_last


@triton.jit
def _best_of_row(best, bests, arrivals, row):
    """Return the largest of what the programs of a row have found, of which this one found `best`,
    and whether this program is the row's last: only that one knows it. `bests` [rows, pieces] is
    scratch memory."""
    pieces = tl.num_programs(1)
    of_row = bests + row.to(tl.int64) * pieces
    if pieces > 1:
        tl.store(of_row + tl.program_id(1), best)
    is_last = _is_last_of_row(arrivals, row)
    if is_last & (pieces > 1):
        lanes: tl.constexpr = 256
        for first in tl.range(0, pieces, lanes):
            nth = first + tl.arange(0, lanes)
            # from the L2 cache, where other programs' stores are
            found = tl.load(of_row + nth, mask=nth < pieces, other=-(2**63), cache_modifier=".cg")
            best = tl.maximum(best, tl.max(found, axis=0))
    return best, is_last


@triton.jit(do_not_specialize=["blocks"])
def find_likeliest(
    maxima,
    tokens,
    finite,
    bests,
    arrivals,
    logits,
    vocab_size,
    blocks,
    stride,
    BLOCK: tl.constexpr,
):
    """Write each row's largest logit [R], its lowest token that has it [R], and whether it is
    finite [R]. NaN is larger than all numbers. Grid: (R, pieces of so many blocks of logits).
    logits: of 16 or 32 bits, with `stride` from row to row."""
    row, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    of_row = logits + row.to(tl.int64) * stride
    begin = tl.program_id(1) * blocks * BLOCK
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    starts = tl.full([BLOCK], begin, tl.int32)
    for start in tl.range(begin, tl.minimum(begin + blocks * BLOCK, vocab_size), BLOCK):
        place = start + lanes
        value = tl.load(of_row + place, mask=place < vocab_size, other=float("-inf"))
        value = value.to(tl.float32)
        is_better = (value > best) | ((value != value) & (best == best))
        best = tl.where(is_better, value, best)
        starts = tl.where(is_better, start, starts)
    packed, is_last = _best_of_row(
        tl.max(_packed(best, starts + lanes), axis=0), bests, arrivals, row
    )
    if is_last:
        value = _value_of(packed)
        tl.store(maxima + row, value)
        tl.store(tokens + row, _token_of(packed))
        tl.store(finite + row, (tl.abs(value) < float("inf")).to(tl.uint8))


@triton.jit
def _add_weights(
    histogram,
    logits,
    begin,
    end,
    vocab_size,
    maximum,
    degrees,
    prefix,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Add the weights of a row's logits from `begin` to `end` to a histogram of their digits above
    SHIFT bits, if the digits before it are `prefix`; those of the first pass as `narrow_top_p`
    says."""
    inverse = _inverse(degrees)
    is_first: tl.constexpr = SHIFT + DIGIT_BITS >= 32
    low_weights = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        scaled = _scaled(logits, place, vocab_size, maximum, degrees, inverse)
        key = _ordered(scaled).to(tl.uint32, bitcast=True) ^ _SIGN
        weight = (libdevice.exp(scaled) * _FIXED_POINT).to(tl.int64)
        is_counted = (scaled <= 0.0) & (weight > 0)
        if is_first:
            is_low = scaled <= _LOW
            if LOW:
                is_counted = is_counted & is_low
            else:
                low_weights += tl.where(is_counted & is_low, weight, 0)
                is_counted = is_counted & (is_low == 0)
        else:
            is_counted = is_counted & ((key >> (SHIFT + DIGIT_BITS)).to(tl.int64) == prefix)
        digit = ((key >> SHIFT) & ((1 << DIGIT_BITS) - 1)).to(tl.int32)
        tl.atomic_add(histogram + digit, weight, mask=is_counted, sem="relaxed")
    if is_first and not LOW:
        tl.atomic_add(histogram, tl.sum(low_weights, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["blocks"])
def narrow_top_p(
    least,
    prefixes,
    needed,
    histograms,
    arrivals,
    logits,
    maxima,
    rows,
    temperature,
    top_p,
    vocab_size,
    blocks,
    stride,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    LOW: tl.constexpr,
):
    """Find the next digit of the least key that top_p keeps: a pass of
    `triton_ops.sampling.smallest_sufficient_key`, for the digit above SHIFT bits.

    There are two passes for the first digit. One adds up low logits in registers, as if all had the
    lowest digit, for nearly all logits are low, and adding to memory is slow. If its result is that
    digit, it leaves a prefix of -1, and the other one (LOW) tells low logits apart.

    Grid: (G, pieces of so many blocks of logits). `histograms` [G, 2 ** DIGIT_BITS] is zero before.
    `prefixes`, the digits so far, and `needed`, the weight that is left to find, int64 [G], go from
    pass to pass. The pass whose SHIFT is 0 writes `least`, float32 [G]: the least scaled logit that
    is kept, minus infinity where top_p is 1.
    """
    drawn = tl.program_id(0)
    row = tl.load(rows + drawn)
    is_first: tl.constexpr = SHIFT + DIGIT_BITS >= 32
    prefix = tl.zeros([], tl.int64)
    if LOW:
        known = tl.load(prefixes + drawn)
        if known >= 0:
            return
    if not is_first:
        prefix = tl.load(prefixes + drawn)
    digits: tl.constexpr = 1 << DIGIT_BITS
    histogram = histograms + drawn.to(tl.int64) * digits
    begin = tl.program_id(1) * blocks * BLOCK
    _add_weights(
        histogram,
        logits + row * stride,
        begin,
        tl.minimum(begin + blocks * BLOCK, vocab_size),
        vocab_size,
        tl.load(maxima + row),
        tl.load(temperature + drawn),
        prefix,
        BLOCK,
        SHIFT,
        DIGIT_BITS,
        LOW,
    )
    if _is_last_of_row(arrivals, drawn):
        digit = tl.arange(0, digits)
        weights = tl.load(histogram + digit, cache_modifier=".cg")
        at_or_above = tl.cumsum(weights, axis=0, reverse=True)
        share = tl.load(top_p + drawn)
        if is_first and not LOW:
            total = tl.sum(weights, axis=0)
            missing = tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)
        else:
            missing = tl.load(needed + drawn)
        chosen = tl.sum((at_or_above >= missing).to(tl.int32), axis=0) - 1
        chosen = tl.maximum(chosen, 0)
        prefix = (prefix << DIGIT_BITS) | chosen
        if SHIFT > 0:
            above = tl.sum(tl.where(digit > chosen, weights, 0), axis=0)
            if is_first and not LOW:
                prefix = tl.where(chosen == 0, -1, prefix)
            tl.store(prefixes + drawn, prefix)
            tl.store(needed + drawn, missing - above)
        else:
            kept = _number((prefix.to(tl.uint32) ^ _SIGN).to(tl.int32, bitcast=True))
            tl.store(least + drawn, tl.where(share < 1.0, kept, float("-inf")))


@triton.jit(do_not_specialize=["blocks"])
def draw_likely(
    tokens,
    bests,
    arrivals,
    logits,
    maxima,
    rows,
    keys,
    temperature,
    min_p,
    least,
    vocab_size,
    blocks,
    stride,
    BLOCK: tl.constexpr,
):
    """Draw a token of each row that has no top_k: tokens [G]. Grid: (G, pieces of so many blocks of
    logits). logits: of 16 or 32 bits, with `stride` from row to row; `least`, float32 [G], is that
    of `narrow_top_p`, or None; the others are tensors of `triton_ops.sampling.draw_tokens`."""
    drawn, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(rows + drawn)
    maximum, degrees = tl.load(maxima + row), tl.load(temperature + drawn)
    inverse = _inverse(degrees)
    first_key = tl.load(keys + 2 * drawn).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys + 2 * drawn + 1).to(tl.uint32, bitcast=True)
    share, lowest = tl.load(min_p + drawn), float("-inf")
    if share > 0.0:
        lowest = libdevice.log(share).to(tl.float32)
    if least is not None:
        lowest = tl.maximum(lowest, tl.load(least + drawn))
    begin = tl.program_id(1) * blocks * BLOCK
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    starts = tl.full([BLOCK], begin, tl.int32)
    for start in tl.range(begin, tl.minimum(begin + blocks * BLOCK, vocab_size), BLOCK):
        place = start + lanes
        scaled = _scaled(logits + row * stride, place, vocab_size, maximum, degrees, inverse)
        value = scaled - _log_of_exponential(place, first_key, second_key)
        is_better = (value > best) & (scaled >= lowest)  # NaN is never better
        best = tl.where(is_better, value, best)
        starts = tl.where(is_better, start, starts)
    packed, is_last = _best_of_row(
        tl.max(_packed(best, starts + lanes), axis=0), bests, arrivals, drawn
    )
    if is_last:
        tl.store(tokens + drawn, _token_of(packed))
