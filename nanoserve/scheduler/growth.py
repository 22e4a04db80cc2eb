"""How long the running sequences will go on and grow, guessed from the answers that have ended.

The idea is to look into the future of the pool with nothing new admitted: every running sequence takes one more
token per round until it ends and gives its blocks back. The most that is ever held beyond what is held now is what
a policy should keep free.
"""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.queues import AgeOrdered

_RENEWED_EVERY = 16
"""Steps; a forecast looks at all running sequences. In between, those that begin are added to it; if none is left,
nothing is expected of those that are gone."""

_REMEMBERED = 1000
_GOLDEN_RATIO = 0.6180339887498949


class OutputLengths:
    """The lengths of the last thousand answers that ended by themselves."""

    def __init__(self) -> None:
        self._in_order_of_time: deque[int] = deque()
        self._sorted: list[int] = []
        self._sum = self._sum_of_squares = 0

    def record(self, length: int) -> None:
        """An answer has ended after so many tokens."""
        if len(self._sorted) == _REMEMBERED:
            oldest = self._in_order_of_time.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
            self._sum -= oldest
            self._sum_of_squares -= oldest * oldest
        self._in_order_of_time.append(length)
        insort(self._sorted, length)
        self._sum += length
        self._sum_of_squares += length * length

    def remaining(self, sequence: Sequence) -> int:
        """Tokens this sequence may still produce, one guess out of the spread of those that are possible.

        The guess is one of the known lengths that exceed what it has produced. Which one depends on the sequence's
        id alone: multiples of the golden ratio spread evenly, so that many sequences together show the spread that
        the known lengths have. A sequence longer than any known answer is taken to be half way; with none known, an
        answer is taken to be as long as its prompt.
        """
        produced = sequence.output_length
        bound = sequence.max_length - len(sequence.tokens)
        passed = bisect_right(self._sorted, produced)
        longer = len(self._sorted) - passed
        if longer == 0:
            return min(produced if self._sorted else max(produced, sequence.prompt_length), bound)
        place = int(sequence.sequence_id * _GOLDEN_RATIO % 1.0 * longer)
        return min(self._sorted[passed + place] - produced, bound)

    def _deviation(self) -> float:
        """The standard deviation of the known lengths."""
        count = len(self._sorted)
        return math.sqrt(self._sum_of_squares * count - self._sum**2) / count if count else 0.0

    def expected_growth(self, running: Iterable[Sequence]) -> int:
        """Tokens by which the running sequences together will at most exceed what they hold now.

        To what is expected comes the standard deviation of the sum of so many lengths, or it would be exceeded every
        second time. The rest of a prompt that is partly computed counts as held.
        """
        futures = sorted(((self.remaining(sequence), len(sequence.tokens)) for sequence in running), reverse=True)
        peak = held = 0
        # From the last to end to the first: when the one with `remaining` ends, all before it in the list are there.
        for number, (remaining, length) in enumerate(futures, start=1):
            held += length
            peak = max(peak, held + number * remaining)
        return peak - held + round(self._deviation() * math.sqrt(len(futures)))


class Forecaster:
    """What the Scheduler tells policies of the future of the device's blocks.

    Args:
        wanted: whether the policy reads it; otherwise nothing is looked at, and all that is foretold is 0.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._lengths = OutputLengths()
        self._growth = self._longest = 0

    def record(self, length: int) -> None:
        """An answer has ended by itself, after so many tokens."""
        if self._wanted:
            self._lengths.record(length)

    def add(self, begun: Iterable[Sequence]) -> None:
        """These begin with the plan that was just made; those on the host take no block of the device."""
        if self._wanted:
            on_device = (sequence for sequence in begun if sequence.place is Place.DEVICE)
            self._growth += sum(map(self._lengths.remaining, on_device))

    def look(self, step: int, running: AgeOrdered) -> tuple[int, int]:
        """The forecast for the plan of that number, of the sequences that run on the device.

        Returns:
            ``Load.expected_growth`` in tokens, and ``Load.longest_remaining``.
        """
        if self._wanted and (step % _RENEWED_EVERY == 0 or not running):
            decodes = (sequence for sequence in running if sequence.status is Status.DECODE)
            self._growth = self._lengths.expected_growth(running)
            self._longest = max(map(self._lengths.remaining, decodes), default=0)
        return self._growth, self._longest
