"""The shipped tables of request lengths: what is left of a public trace when its requests are gone.

Of each trace there are 101 quantiles (0 %, 1 %, ... 100 %) of its input and of its output lengths, and the rank
correlation between the two. ``scripts/make_length_tables.py`` makes the file from the traces themselves.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist

import msgspec

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape

FILE = Path(__file__).with_name("length_tables.json")
NUM_QUANTILES = 101


class LengthTable(msgspec.Struct, frozen=True, kw_only=True):
    """The lengths of one trace in brief."""

    source: str
    """Where the trace is from."""
    licence: str
    """Licence of the trace."""
    requests: int
    """Number of requests in the trace."""
    mean_input: float
    mean_output: float
    """Mean lengths, in tokens."""
    rank_correlation: float
    """Spearman's rank correlation of input and output lengths."""
    input_quantiles: tuple[int, ...]
    output_quantiles: tuple[int, ...]
    """Quantiles of the lengths in tokens, ascending, [NUM_QUANTILES]."""

    def draw(self, seed: int) -> Iterator[RequestShape]:
        """Lengths with these distributions and this rank correlation, joined by a Gaussian copula: an endless stream.

        Two normal variables whose Pearson correlation is 2 sin(pi / 6 times the rank correlation) have that rank
        correlation; their ranks choose the quantiles.
        """
        generator, cdf = random.Random(seed), NormalDist().cdf
        inputs, outputs = _Curve(self.input_quantiles, self.mean_input), _Curve(self.output_quantiles, self.mean_output)
        correlation = 2 * math.sin(math.pi / 6 * self.rank_correlation)
        rest = math.sqrt(1 - correlation**2)
        while True:
            first, second = generator.gauss(), generator.gauss()
            yield RequestShape(inputs.at(cdf(first)), outputs.at(cdf(correlation * first + rest * second)))


class _Curve:
    """Lengths between quantiles: linear, but for the last percent, which bends so that the mean is the trace's.

    A few very long requests make the last step a high one. A straight line over it would make them many, and the mean
    too large: by a fifth for the outputs of azure-code.
    """

    def __init__(self, quantiles: Sequence[int], mean: float) -> None:
        self._quantiles = quantiles
        self._last = len(quantiles) - 2
        low, high = quantiles[-2], quantiles[-1]
        straight = sum(quantiles[:-1]) - (quantiles[0] + low) / 2
        mean_of_last = mean * (len(quantiles) - 1) - straight
        # The mean of low + (high - low) * x ** power, for x from 0 to 1, is low + (high - low) / (power + 1).
        self._power = max(1.0, (high - low) / (mean_of_last - low) - 1) if mean_of_last > low else 1.0

    def at(self, share: float) -> int:
        """The length that this share of the requests, in [0, 1], do not exceed."""
        below, fraction = divmod(share * (self._last + 1), 1)
        place = int(below)
        if place > self._last:
            return self._quantiles[-1]
        low, high = self._quantiles[place], self._quantiles[place + 1]
        return round(low + (high - low) * (fraction**self._power if place == self._last else fraction))


@cache
def length_tables() -> dict[str, LengthTable]:
    """All shipped tables by name."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, LengthTable])


def load_length_table(name: str) -> LengthTable:
    """The shipped table of that name.

    Raises:
        UsageError: if there is none.
    """
    tables = length_tables()
    if name not in tables:
        raise UsageError(f"unknown lengths {name!r}; choose one of {', '.join(tables)}")
    return tables[name]
