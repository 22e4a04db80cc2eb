"""Sequences in order of age."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from nanoserve.request import Sequence


def _age(sequence: Sequence) -> int:
    return sequence.sequence_id


class AgeOrdered:
    """A set of sequences, oldest first. Ends are cheap, which is where the scheduler works."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        position = bisect_left(self._items, _age(sequence), key=_age)
        return position < len(self._items) and self._items[position] is sequence

    @property
    def oldest(self) -> Sequence | None:
        return self._items[0] if self._items else None

    @property
    def newest(self) -> Sequence | None:
        return self._items[-1] if self._items else None

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._items, _age(sequence), key=_age)
        if position == len(self._items) or self._items[position] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} is not here")
        del self._items[position]


class WaitingQueue(AgeOrdered):
    """Sequences that hold no blocks, with the number of tokens they wait for: #WP without the partly prefilled."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self.tokens -= len(sequence.tokens)
