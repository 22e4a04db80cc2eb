"""When requests come: endless streams of seconds, in order, equal for equal seeds."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

from nanoserve.errors import UsageError

_REASONABLE = 1e9
"""Beyond, or below one over it, sums of gaps are no numbers any more."""


def burst() -> Iterator[float]:
    """A closed batch: all at once, at zero."""
    return repeat(0.0)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Independent arrivals with a mean of ``rate`` requests per second.

    Raises:
        UsageError: for a rate that is not above 0, or absurd.
    """
    return gamma_arrivals(rate, 1.0, seed)


def gamma_arrivals(rate: float, variation: float, seed: int) -> Iterator[float]:
    """Gamma distributed gaps with a mean of 1 / rate.

    Args:
        rate: requests per second.
        variation: the gaps' standard deviation over their mean: 1 is Poisson, more comes in bursts, less evenly.

    Raises:
        UsageError: for a rate or a variation that is not above 0, or absurd.
    """
    for name, value in (("the request rate", rate), ("the variation of the gaps", variation)):
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a number above 0, not {value}")
        if not 1 / _REASONABLE <= value <= _REASONABLE:
            raise UsageError(f"{name} must lie between {1 / _REASONABLE:g} and {_REASONABLE:g}, not at {value:g}")
    shape = 1 / variation**2
    return _gamma(shape, 1 / (rate * shape), random.Random(seed))


def _gamma(shape: float, scale: float, generator: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += generator.gammavariate(shape, scale)
        yield now


def trace_arrivals(times: Sequence[float]) -> Iterator[float]:
    """The times of a trace, counted from its first; the stream ends with it.

    Raises:
        UsageError: naming the first request that comes before the one in front of it.
    """
    for number, (before, after) in enumerate(pairwise(times), start=2):
        if after < before:
            raise UsageError(f"the trace is not in order of time: request {number} comes before the one in front of it")
    return (time - times[0] for time in times)
