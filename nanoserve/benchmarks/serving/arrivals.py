"""When requests come: pure functions from rates and traces to seconds since the beginning of a run."""

import math
import random
from collections.abc import Sequence

from nanoserve.errors import UsageError

HIGHEST_RATE = 1e6


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """The first arrivals of a Poisson process: independent exponential gaps with mean 1 / rate.

    An infinite rate lets all of them come at once, at zero.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        arrivals.append(now)
    return arrivals


def trace_arrivals(times: Sequence[float], rate: float | None = None) -> list[float]:
    """The times of a trace from its first arrival on, evenly stretched to a mean rate if one is given.

    The mean rate of n arrivals is n - 1 over the time from the first to the last.

    Raises:
        UsageError: if the trace has no duration that could be stretched.
    """
    first = min(times)
    offsets = [time - first for time in times]
    if rate is None:
        return offsets
    if math.isinf(rate):
        return [0.0] * len(offsets)
    duration = max(offsets)
    if duration == 0:
        raise UsageError("the trace's requests come all at once: there is no rate to change, leave --rate away")
    stretch = (len(offsets) - 1) / rate / duration
    return [offset * stretch for offset in offsets]


def offered_rate(arrivals: Sequence[float]) -> float | None:
    """Requests per second as they come; None if they come all at once."""
    span = max(arrivals) - min(arrivals)
    return (len(arrivals) - 1) / span if span > 0 else None


def parse_rates(text: str, flag: str) -> tuple[float, ...]:
    """Requests per second above 0, or inf, separated by commas: "0.5,2,inf".

    Raises:
        UsageError: naming the flag.
    """
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not (0 < rate <= HIGHEST_RATE or rate == math.inf):
            raise UsageError(f"{flag} takes requests per second such as 0.5,2,inf, not {text!r:.100}")
        rates.append(rate)
    return tuple(dict.fromkeys(rates))
