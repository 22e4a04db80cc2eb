"""How far the running sequences will grow, estimated from the lengths of the answers that have
ended.

With nothing new admitted, a policy should keep free the most that they will ever hold beyond what
they hold now.
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from nanoserve.request import Place, Sequence, Status

# steps between two forecasts of all running sequences; in between, those that begin are added
_RENEWED_EVERY = 16
_REMEMBERED = 1000
_GOLDEN_RATIO = 0.6180339887498949
# added to what is expected: normally distributed sums of lengths exceed that once in fifteen times
_DEVIATIONS = 1.5


class GrowthForecast:
    """Forecasts how far answers will grow, by the last thousand that ended and the answers that
    still run. The first answers to end are short, so running answers count too. Kaplan's and
    Meier's estimate (1958) of a survival curve takes both into account."""

    def __init__(self) -> None:
        self._in_order_of_time = deque[int]()
        self._sorted: list[int] = []
        self._lengths: list[int] = []  # those of _sorted when the curve was drawn
        self._ended: list[float] = []  # the share of answers that are no longer than each of these
        self._longest = 0  # produced by a sequence that still ran
        self._growth = self._longest_remaining = 0

    def record(self, length: int) -> None:
        """Take in the length of an answer that has ended."""
        if len(self._sorted) == _REMEMBERED:
            oldest = self._in_order_of_time.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._in_order_of_time.append(length)
        insort(self._sorted, length)

    def renew(self, produced: Iterable[int]) -> None:
        """Draw the curve again, with what the running sequences have produced so far."""
        going_on = sorted(produced)
        self._lengths = self._sorted.copy()
        self._longest = max(going_on, default=0)
        # that have produced at least each length
        running = len(going_on) - np.searchsorted(going_on, self._lengths)
        ended = np.arange(len(self._lengths), 0, -1)  # answers that are at least as long
        self._ended = (1 - np.cumprod(1 - 1 / (ended + running))).tolist()

    def remaining(self, sequence: Sequence) -> int:
        """Tokens that this sequence may still produce: one draw from the distribution of lengths.

        It lies on the curve beyond what the sequence has produced, at a place that depends on its
        id alone: multiples of the golden ratio spread evenly. Beyond the curve's end the longest
        running sequence counts as half done. With no answer known, an answer counts as long as its
        prompt.
        """
        produced = sequence.output_length
        bound = sequence.max_length - len(sequence.tokens)
        if not self._lengths:
            return min(max(produced, sequence.prompt_length), bound)
        passed = bisect_right(self._lengths, produced)
        before = 0.0
        if passed:
            before = self._ended[passed - 1]
        share = sequence.sequence_id * _GOLDEN_RATIO % 1.0
        place = bisect_right(self._ended, before + share * (1 - before), lo=passed)
        if place < len(self._lengths):
            length = self._lengths[place]
        else:
            length = 2 * max(self._longest, produced)
        return min(length - produced, bound)

    def deviation(self) -> float:
        """The standard deviation of an answer's length."""
        shares = np.diff([0.0, *self._ended, 1.0])
        lengths = np.array([*self._lengths, 2 * self._longest])
        mean = shares @ lengths
        return math.sqrt(shares @ (lengths - mean) ** 2)

    def expected_growth(self, running: SequenceOf[Sequence]) -> int:
        """Tokens by which the running sequences together will at most exceed what they hold now,
        prompts included. Some standard deviations of the sum of the lengths are added, or every
        second forecast would be too low."""
        futures = sorted(
            ((self.remaining(sequence), len(sequence.tokens)) for sequence in running), reverse=True
        )
        peak = held = 0
        # From the last to end to the first: when the one with `remaining` ends, all before it in
        # the list still run.
        for number, (remaining, length) in enumerate(futures, start=1):
            held += length
            peak = max(peak, held + number * remaining)
        margin = _DEVIATIONS * self.deviation() * math.sqrt(len(futures))
        return peak - held + round(margin)

    def add(self, begun: Iterable[Sequence]) -> None:
        """Add the sequences that begin with the latest plan; sequences on the host take no device
        block."""
        self._growth += sum(
            [self.remaining(sequence) for sequence in begun if sequence.place is Place.DEVICE]
        )

    def look(self, step: int, running: SequenceOf[Sequence]) -> tuple[int, int]:
        """``Load.expected_growth`` and ``longest_remaining`` for plan ``step``, from the sequences
        on the device."""
        if step % _RENEWED_EVERY == 0:
            self.renew(sequence.output_length for sequence in running)
            decodes = (sequence for sequence in running if sequence.status is Status.DECODE)
            self._growth = self.expected_growth(running)
            self._longest_remaining = max(map(self.remaining, decodes), default=0)
        elif not running:  # nothing is expected of sequences that are gone
            self._growth = self._longest_remaining = 0
        return self._growth, self._longest_remaining
