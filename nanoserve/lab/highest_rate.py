"""The highest request rate that an engine takes, by trials: the same requests come at one rate
after another.

A rate counts only if no queue grows. A short run cannot tell, so a run is lengthened until it can.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from statistics import fmean, linear_regression, stdev
from typing import Any, NamedTuple

from nanoserve.errors import UsageError

_FEWEST_REQUESTS = 16
_MOST_GROWTH = 0.02  # of latency, in seconds per second: two percent above the capacity
_ATTAINED = 0.99  # share of requests that must keep to the limits, where there are some
_PRECISION = 1.02  # ratio of two neighbouring rates at which the search ends
# of the rate at which requests end when all come at once: nearly all are alone then
_LOWEST = 1 / 64
_BLOCKS = 8  # groups of neighbouring answers whose mean latencies are compared
_STUDENT_T = 3.707  # two-sided, 99 %, for the _BLOCKS - 1 steps between blocks
_NORMAL = 2.576  # two-sided, 99 %
# a run shorter than so many early latencies shows how an engine fills, not how it keeps up
_SETTLING_LATENCIES = 4


class TimedAnswer(NamedTuple):
    """An answer of a trial; times in seconds."""

    arrival: float
    ttft: float
    tpot: float | None
    output_tokens: int


def latency_growth(answers: Sequence[TimedAnswer]) -> float | None:
    """Seconds by which latency grows with each second of arrivals, by least squares: near 0 where
    no queue grows.

    Each latency is taken as if its answer had the mean number of tokens. None if all came at once.
    """
    arrivals = [answer.arrival for answer in answers]
    if len(set(arrivals)) < 2:
        return None
    return linear_regression(arrivals, _equal_latencies(answers)).slope


def _equal_latencies(answers: Sequence[TimedAnswer]) -> list[float]:
    """Latencies in seconds, as if all answers had the same number of tokens."""
    following = fmean(answer.output_tokens for answer in answers) - 1
    return [answer.ttft + following * (answer.tpot or 0.0) for answer in answers]


class Verdict(Enum):
    """Whether a rate holds."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"


def judge_queue(answers: Sequence[TimedAnswer]) -> Verdict:
    """Decide by the second half of a run, in which the engine has filled, whether latency grows.

    The slope of the latency has a 99 % confidence interval. The rate holds if the whole interval
    lies below two percent of the time, fails if all of it lies above, and is undecided otherwise,
    or if the run is too short beside its own latencies.
    """
    ordered = sorted(answers)
    half = ordered[len(ordered) // 2 :]
    early = ordered[: len(ordered) // 4]
    if len(half) < 2 * _BLOCKS or half[0].arrival == half[-1].arrival:
        return Verdict.UNDECIDED
    span = ordered[-1].arrival - ordered[0].arrival
    if span < _SETTLING_LATENCIES * fmean(_equal_latencies(early)):
        return Verdict.UNDECIDED
    low, high = _slope_interval([answer.arrival for answer in half], _equal_latencies(half))
    if high <= _MOST_GROWTH:
        return Verdict.HOLDS
    if low > _MOST_GROWTH:
        return Verdict.FAILS
    return Verdict.UNDECIDED


def _slope_interval(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The 99 % confidence interval of the slope, from the steps between the means of neighbouring
    blocks.

    Near its capacity a queue is a random walk, whose values depend on each other but whose steps do
    not.
    """
    edges = [len(times) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    blocks = [slice(begin, end) for begin, end in pairwise(edges)]
    block_times = [fmean(times[block]) for block in blocks]
    block_values = [fmean(values[block]) for block in blocks]
    steps = [after - before for before, after in pairwise(block_values)]
    seconds_per_step = (block_times[-1] - block_times[0]) / len(steps)
    slope = fmean(steps) / seconds_per_step
    error = _STUDENT_T * stdev(steps) / math.sqrt(len(steps)) / seconds_per_step
    return slope - error, slope + error


def judge_share(share: float, requests: int) -> Verdict:
    """Decide by Wilson's 99 % confidence interval whether enough of all requests keep to the
    limits."""
    squared = _NORMAL**2
    center = (share + squared / (2 * requests)) / (1 + squared / requests)
    variance = share * (1 - share) / requests + squared / (4 * requests**2)
    error = _NORMAL * math.sqrt(variance) / (1 + squared / requests)
    if center - error >= _ATTAINED:
        return Verdict.HOLDS
    if center + error < _ATTAINED:
        return Verdict.FAILS
    return Verdict.UNDECIDED


class RateTrial(NamedTuple):
    """One run at one rate."""

    requests_per_second: float
    answers: Sequence[TimedAnswer]
    attainment: float | None = None
    """Share of the requests within the limits, None without any."""


class HighestRate:
    """A search for the highest rate at which no queue grows and, with limits, nearly all requests
    keep to them.

    ``trial`` runs this many requests at this rate. A run begins with ``requests``, and has twice as
    many until it is decided, at most ``most_requests``.
    """

    def __init__(
        self, trial: Callable[[float, int], RateTrial], requests: int, most_requests: int
    ) -> None:
        """Raises UsageError for too few ``requests`` of a trial."""
        if requests < _FEWEST_REQUESTS:
            raise UsageError(
                f"--max-rate takes at least {_FEWEST_REQUESTS} requests, not {requests}: see "
                "--requests"
            )
        self._trial = trial
        self._requests = requests
        self._most_requests = max(requests, most_requests)
        self._undecided: list[float] = []
        self._most_run = requests
        self._attainment: float | None = None  # of the last trial

    def find(self) -> dict[str, Any]:
        """The rate, in requests per second, rates that no run could decide, and a sentence. The
        rate is None if no rate holds, or every rate does.

        The first trial has an infinite rate, and tells where to look. From there the rate is
        doubled or halved, then bisected. An undecided rate counts as too high.
        """
        at_once = self._trial(math.inf, self._requests)
        if at_once.attainment is not None:
            rule = f"no queue grows and {_ATTAINED:.0%} of the requests keep to the limits"
            if at_once.attainment >= _ATTAINED:
                words = (
                    f"all {self._requests} requests keep to the limits even when they come at "
                    "once: give more"
                )
                return self._found(None, f"{words} --requests")
        else:
            rule = "no queue grows"
        low = high = at_once.requests_per_second
        lowest = _LOWEST * high
        if low and self._holds(low):
            while self._holds(high := 2 * low):
                low = high
        elif low and self._holds(lowest):
            low = high / 2
            while low > lowest and not self._holds(low):
                high = low
                low = high / 2
        else:
            words = f"{rule} at none of these rates"
            if self._attainment is not None:
                words += f"; at the lowest, {self._attainment:.1%} keep to them"
            return self._found(None, words)
        while high > _PRECISION * low:
            middle = math.sqrt(low * high)
            if self._holds(middle):
                low = middle
            else:
                high = middle
        return self._found(low, f"{rule} up to {low:.3g} requests/s")

    def _holds(self, rate: float) -> bool:
        requests = self._requests
        while True:
            self._most_run = max(self._most_run, requests)
            tried = self._trial(rate, requests)
            verdicts = [judge_queue(tried.answers)]
            if tried.attainment is not None:
                self._attainment = tried.attainment
                verdicts.append(judge_share(tried.attainment, requests))
            if Verdict.FAILS in verdicts:
                return False
            if Verdict.UNDECIDED not in verdicts:
                return True
            if requests >= self._most_requests:
                self._undecided.append(rate)
                return False
            requests = min(2 * requests, self._most_requests)

    def _found(self, rate: float | None, words: str) -> dict[str, Any]:
        undecided = sorted(self._undecided)
        if undecided:
            rates = ", ".join(f"{one:.3g}" for one in undecided)
            words += f"; runs of {self._most_run} requests did not decide {rates}"
        return {"rate": rate, "undecided": undecided, "words": words}
