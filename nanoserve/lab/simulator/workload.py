"""Requests to simulate: when they come, how long they are, and Workload, which joins the two.

Arrivals and lengths are endless streams, equal for equal seeds. Of each public trace there is a
shipped table of its lengths: 101 quantiles (0 %, 1 %, ... 100 %) of its input and of its output
lengths, and the rank correlation between the two. ``scripts/make_length_tables.py`` makes the file
from the traces themselves.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, islice, repeat
from pathlib import Path
from statistics import NormalDist

import msgspec

from nanoserve.errors import UsageError, shown
from nanoserve.lab.simulator.executor import DUMMY_TOKEN, END_TOKEN
from nanoserve.lab.workloads import parse_sizes
from nanoserve.request import Request, RequestShape, SamplingParams

FILE = Path(__file__).with_name("length_tables.json")
NUM_QUANTILES = 101
GLLMS_SHAREGPT = "sharegpt-gllm"
_SHAREGPT_MOMENTS = (222.0, 127.0, 1.2, 1.0)
"""gLLM's ShareGPT: mean input and output tokens (Azure's over 5.21 and 1.66), and sigmas of heavy
tails."""
_REASONABLE = 1e9  # beyond, or below one over it, sums of gaps are no numbers any more
_UNLIMITED = SamplingParams(temperature=0.0)


class Workload:
    """Requests whose tokens mean nothing and whose seed is the length of the answer; it can be gone
    through once.

    The shorter of the two streams, arrivals in seconds and lengths, ends it, or the limit of
    requests.
    """

    def __init__(
        self, arrivals: Iterable[float], lengths: Iterable[RequestShape], limit: int | None = None
    ) -> None:
        self._pairs = islice(zip(arrivals, lengths, strict=False), limit)

    def __iter__(self) -> Iterator[Request]:
        for number, (time, shape) in enumerate(self._pairs):
            prompt = (DUMMY_TOKEN,) * shape.input_tokens
            name = f"request-{number}"
            yield Request(
                name,
                prompt,
                _UNLIMITED,
                shape.output_tokens,
                end_tokens=(END_TOKEN,),
                arrival_time=time,
            )


def burst() -> Iterator[float]:
    """A closed batch: all at once, at zero."""
    return repeat(0.0)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Independent arrivals with a mean of ``rate`` requests per second; raises as
    `gamma_arrivals`."""
    return gamma_arrivals(rate, 1.0, seed)


def gamma_arrivals(rate: float, variation: float, seed: int) -> Iterator[float]:
    """Gamma distributed gaps with a mean of 1 / rate, where ``rate`` is in requests per second.

    ``variation`` is the gaps' standard deviation over their mean: 1 is Poisson, more comes in
    bursts, less evenly. Raises UsageError for a rate or a variation that is not above 0, or absurd.
    """
    for name, value in (("the request rate", rate), ("the variation of the gaps", variation)):
        if not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a number above 0, not {value}")
        if not 1 / _REASONABLE <= value <= _REASONABLE:
            raise UsageError(
                f"{name} must lie between {1 / _REASONABLE:g} and {_REASONABLE:g}, not at {value:g}"
            )
    shape = 1 / variation**2
    generator, scale = random.Random(seed), 1 / (rate * shape)
    return accumulate(generator.gammavariate(shape, scale) for _ in repeat(None))


def named_lengths(name: str, seed: int, others: Sequence[str] = ()) -> Iterator[RequestShape]:
    """Lengths by a shipped table's name, gLLM's moments, or fixed as 512+128.

    Raises UsageError for another name, listing the names after ``others`` that the caller knows.
    """
    if name == GLLMS_SHAREGPT:
        return lognormal_lengths(*_SHAREGPT_MOMENTS, seed=seed)
    if name in length_tables():
        return length_tables()[name].draw(seed)
    parts = name.split("+")
    if len(parts) != 2:
        known = ", ".join(list(others) + [GLLMS_SHAREGPT] + list(length_tables()))
        raise UsageError(
            f"--lengths takes tokens in and out such as 512+128, or one of {known}; not "
            f"{shown(name)}"
        )
    inputs, outputs = (parse_sizes(part, "--lengths")[0] for part in parts)
    return fixed_lengths(inputs, outputs)


def fixed_lengths(input_tokens: int, output_tokens: int) -> Iterator[RequestShape]:
    """Equal lengths; raises UsageError for a length below one token."""
    if min(input_tokens, output_tokens) < 1:
        raise UsageError(
            f"a request has at least one token in and one out, not {input_tokens} and "
            f"{output_tokens}"
        )
    return repeat(RequestShape(input_tokens, output_tokens))


def lognormal_lengths(
    input_mean: float, output_mean: float, input_sigma: float, output_sigma: float, seed: int
) -> Iterator[RequestShape]:
    """Independent lognormal lengths, with means in tokens; the sigmas are those of the lengths'
    natural logarithms.

    Raises UsageError for a mean below one token or a negative sigma.
    """
    if min(input_mean, output_mean) < 1 or min(input_sigma, output_sigma) < 0:
        raise UsageError(
            "lognormal lengths take means of at least one token and sigmas of at least 0"
        )
    generator = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        return max(1, round(generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    return (
        RequestShape(draw(input_mean, input_sigma), draw(output_mean, output_sigma))
        for _ in repeat(None)
    )


class LengthTable(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of one trace in brief, in tokens."""

    source: str
    licence: str
    requests: int
    mean_input: float
    mean_output: float
    rank_correlation: float
    """Spearman's rank correlation of input and output lengths."""
    input_quantiles: tuple[int, ...]
    output_quantiles: tuple[int, ...]
    """Ascending, [NUM_QUANTILES]."""

    def draw(self, seed: int) -> Iterator[RequestShape]:
        """Lengths with these distributions and this rank correlation, joined by a Gaussian copula:
        an endless stream.

        Two normal variables whose Pearson correlation is 2 sin(pi / 6 times the rank correlation)
        have that rank correlation; their ranks choose the quantiles.
        """
        generator, cdf = random.Random(seed), NormalDist().cdf
        inputs, outputs = (
            _Curve(self.input_quantiles, self.mean_input),
            _Curve(self.output_quantiles, self.mean_output),
        )
        correlation = 2 * math.sin(math.pi / 6 * self.rank_correlation)
        rest = math.sqrt(1 - correlation**2)
        while True:
            first, second = generator.gauss(), generator.gauss()
            yield RequestShape(
                inputs.at(cdf(first)), outputs.at(cdf(correlation * first + rest * second))
            )


class _Curve:
    """Lengths between quantiles: linear, but for the last percent, which bends so that the mean is
    the trace's.

    A few very long requests make the last step a high one; a straight line over it would make the
    mean too large.
    """

    def __init__(self, quantiles: Sequence[int], mean: float) -> None:
        self._quantiles = quantiles
        self._last = len(quantiles) - 2
        low, high = quantiles[-2], quantiles[-1]
        straight = sum(quantiles[:-1]) - (quantiles[0] + low) / 2
        mean_of_last = mean * (len(quantiles) - 1) - straight
        # The mean of low + (high - low) * x ** power, for x from 0 to 1, is low + (high - low) /
        # (power + 1).
        self._power = 1.0
        if mean_of_last > low:
            self._power = max(1.0, (high - low) / (mean_of_last - low) - 1)

    def at(self, share: float) -> int:
        """The length that this share of the requests, in [0, 1], do not exceed."""
        below, fraction = divmod(share * (self._last + 1), 1)
        place = int(below)
        if place > self._last:
            return self._quantiles[-1]
        low, high = self._quantiles[place], self._quantiles[place + 1]
        if place == self._last:
            fraction **= self._power
        return round(low + (high - low) * fraction)


@cache
def length_tables() -> dict[str, LengthTable]:
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, LengthTable])
