"""The highest request rate that an engine takes, by trials: the same requests come at one rate after another."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

from nanoserve.errors import UsageError

_FEWEST_REQUESTS = 16
_SATURATED = 0.95  # of the throughput of requests that come all at once: it counts as rising no more
_MOST_GROWTH = 0.05  # of latency, in seconds per second: answers lag by so much behind the requests
_ATTAINED = 0.99  # the share of requests that keep to the limits, where there are some
_PRECISION = 1.05
_LOWEST = 1 / 64  # of the rate at which requests end when all come at once: nearly all are alone then


def latency_growth(answers: Sequence[tuple[float, float, float | None, int]]) -> float | None:
    """Seconds by which latency grows with each second of arrivals, by least squares: near 0 where no queue grows. Of
    each answer: its arrival, TTFT, TPOT and tokens; its latency is taken as if it had as many tokens as all in the
    mean. None if all came at once."""
    if len({arrival for arrival, *_ in answers}) < 2:
        return None
    following = fmean(tokens for *_, tokens in answers) - 1
    latencies = [ttft + following * (tpot or 0.0) for _, ttft, tpot, _ in answers]
    return linear_regression([arrival for arrival, *_ in answers], latencies).slope


class RateTrial(NamedTuple):
    requests_per_second: float
    tokens_per_second: float
    growth: float | None  # of the latency
    attainment: float | None  # share of requests within limits, None without any


def find_highest_rate(trial: Callable[[float], RateTrial], requests: int) -> dict[str, Any]:
    """The highest rate, in requests per second, at which throughput still rises with the rate and no queue grows, or
    with limits nearly all requests keep to them; and the same in words. The rate is None if no rate holds, or every one
    does. Raises UsageError for too few ``requests`` of a trial. The rate of the first trial is infinite: it tells where
    to look, and the highest throughput. From there the rate is doubled or halved, then bisected."""
    if requests < _FEWEST_REQUESTS:
        raise UsageError(f"--max-rate takes at least {_FEWEST_REQUESTS} requests, not {requests}: see --requests")
    at_once = trial(math.inf)

    def holds(tried: RateTrial) -> bool:
        if tried.attainment is not None:
            return tried.attainment >= _ATTAINED
        rises = tried.tokens_per_second < _SATURATED * at_once.tokens_per_second
        return rises and (tried.growth or 0.0) <= _MOST_GROWTH

    limited = at_once.attainment is not None
    rule = f"{_ATTAINED:.0%} of the requests keep to the limits" if limited else "throughput rises with the rate"
    if holds(at_once):
        return {"rate": None, "words": f"{rule} even when all come at once"}
    low = high = at_once.requests_per_second
    lowest = _LOWEST * high
    if low and holds(trial(low)):
        while holds(trial(high := 2 * low)):
            low = high
    else:
        while high > lowest and not holds(trial(low := high / 2)):
            high = low
        if low == high:
            return {"rate": None, "words": f"{rule} at none of these rates"}
    while high > _PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(trial(middle)) else (low, middle)
    return {"rate": low, "words": f"{rule} up to {low:.3g} requests/s"}
