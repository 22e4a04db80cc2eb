"""Rounds between two readings of the machine's read bandwidth: which of them count, and which belong together.

Ratios are formed within a round that counts, and reported for each bandwidth state apart. No torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

MAX_DRIFT = 0.10
STATE_WIDTH = 1.25  # readings within this factor of a state's lowest belong to it
BUSY_CORES = 0.2  # a round is told apart if others keep more than this busy during any part of it
MAX_ATTEMPTS = 2  # rounds tried for every round that is wanted, when some do not count
GIGA = 1e9


class Bracketed(msgspec.Struct, frozen=True, kw_only=True):
    """A round of one case."""

    case: str
    number: int
    bandwidth_before: float
    bandwidth_after: float  # both in GB/s
    foreign_cores: float | None
    """The most that other processes kept busy during any part of it; None where that is unknown."""

    @property
    def drift(self) -> float:
        """How far apart the two readings are, relative to the lower one."""
        low, high = sorted((self.bandwidth_before, self.bandwidth_after))
        return high / low - 1

    @property
    def counts(self) -> bool:
        return self.drift < MAX_DRIFT

    @property
    def is_busy(self) -> bool:
        return (self.foreign_cores or 0.0) > BUSY_CORES

    @property
    def bandwidth(self) -> float:
        return (self.bandwidth_before + self.bandwidth_after) / 2


def busy_note(foreign_cores: float | None) -> str | None:
    """A sentence for figures that were measured beside the work of others; None if none is known."""
    if (foreign_cores or 0.0) <= BUSY_CORES:
        return None
    return f"other programs kept up to {foreign_cores:.1f} cores busy meanwhile: on a quiet machine the figures differ"


R = TypeVar("R", bound=Bracketed)
T = TypeVar("T")
Key = tuple[str, ...]


@contextmanager
def bracket(case: str, number: int, probe: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Fields of a `Bracketed` whose work is done inside; ``probe`` reads bytes per second."""
    fields: dict[str, Any] = {"case": case, "number": number, "bandwidth_before": probe() / GIGA}
    yield fields
    fields["bandwidth_after"] = probe() / GIGA


def most_known(loads: Iterable[float | None]) -> float | None:
    """The largest of the loads that are known; None if none is."""
    return max((load for load in loads if load is not None), default=None)


def until_enough_count(make_round: Callable[[int], R], wanted: int) -> Iterator[R]:
    """Rounds 1, 2, ... as they are made, until ``wanted`` of them count or too many were tried."""
    counted = 0
    for number in range(1, wanted * MAX_ATTEMPTS + 1):
        done = make_round(number)
        yield done
        counted += done.counts
        if counted == wanted:
            return


def in_states(rounds: Sequence[R]) -> list[tuple[R, str]]:
    """The counting rounds in their order, each with its bandwidth state, named by the bandwidths seen in it. Memory
    bandwidth of a virtual machine may flip between two levels. Rounds beside a busy neighbour are states apart."""
    groups: list[list[R]] = []
    for done in sorted((one for one in rounds if one.counts), key=lambda one: (one.is_busy, one.bandwidth)):
        first = groups[-1][0] if groups else None
        if first and done.is_busy == first.is_busy and done.bandwidth < STATE_WIDTH * first.bandwidth:
            groups[-1].append(done)
        else:
            groups.append([done])
    names = {id(done): _state_name(group) for group in groups for done in group}
    return [(done, names[id(done)]) for done in rounds if done.counts]


def grouped(rounds: Sequence[R], values_of: Callable[[R], Mapping[Key, T]]) -> dict[Key, list[T]]:
    """The values of all counting rounds, by their key in a round and the bandwidth state."""
    found: dict[Key, list[T]] = {}
    for done, state in in_states(rounds):
        for key, value in values_of(done).items():
            found.setdefault((*key, state), []).append(value)
    return found


def rotated(items: Iterable[T], number: int) -> list[T]:
    """A B C, B C A, C A B ...: in every round another one is the first."""
    found = list(items)
    first = number % len(found)
    return [*found[first:], *found[:first]]


def _state_name(rounds: Sequence[Bracketed]) -> str:
    ends = dict.fromkeys(f"{one.bandwidth:.0f}" for one in (rounds[0], rounds[-1]))
    return f"{'-'.join(ends)} GB/s" + (", busy" if rounds[0].is_busy else "")
