"""How long requests are: endless streams of shapes, equal for equal seeds."""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import cycle, repeat

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape


def fixed_lengths(input_tokens: int, output_tokens: int) -> Iterator[RequestShape]:
    """Always the same.

    Raises:
        UsageError: for a length below one token.
    """
    if min(input_tokens, output_tokens) < 1:
        raise UsageError(f"a request has at least one token in and one out, not {input_tokens} and {output_tokens}")
    return repeat(RequestShape(input_tokens, output_tokens))


def lognormal_lengths(
    input_mean: float, output_mean: float, input_sigma: float, output_sigma: float, seed: int
) -> Iterator[RequestShape]:
    """Independent lognormal lengths.

    Args:
        input_mean, output_mean: of the lengths, in tokens.
        input_sigma, output_sigma: standard deviations of the lengths' natural logarithms.

    Raises:
        UsageError: for a mean below one token or a negative sigma.
    """
    if min(input_mean, output_mean) < 1 or min(input_sigma, output_sigma) < 0:
        raise UsageError("lognormal lengths take means of at least one token and sigmas of at least 0")
    return _lognormal((input_mean, input_sigma), (output_mean, output_sigma), random.Random(seed))


def _lognormal(
    inputs: tuple[float, float], outputs: tuple[float, float], generator: random.Random
) -> Iterator[RequestShape]:
    while True:
        yield RequestShape(*(_draw(mean, sigma, generator) for mean, sigma in (inputs, outputs)))


def _draw(mean: float, sigma: float, generator: random.Random) -> int:
    # The mean of a lognormal is exp(mu + sigma^2 / 2).
    return max(1, round(generator.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def trace_lengths(shapes: Sequence[RequestShape]) -> Iterator[RequestShape]:
    """A trace's lengths in its order, over and over."""
    return cycle(shapes)
