"""Rounds of a benchmark: which of them count, how long disturbed ones are repeated, and which
belong together.

Ratios are formed within a round that counts, and reported for each bandwidth state apart. No torch.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

MAX_DRIFT = 0.10
STATE_WIDTH = 1.25  # readings within this factor of a state's lowest belong to it
BUSY_CORES = 0.2  # a round is disturbed if others keep more than this busy during any part of it
REPEAT_SECONDS = 120.0  # of a command, for rounds in the place of disturbed ones
GIGA = 1e9
BUSY, UNSTEADY = "busy", "unsteady"
_REASONS = {
    BUSY: "other programs kept cores busy",
    UNSTEADY: "the read bandwidth moved by 10 % or more",
}


class MeasuredRound(msgspec.Struct, frozen=True, kw_only=True):
    """Work that was timed beside whatever else ran on the machine."""

    foreign_cores: float | None
    """The most that other processes kept busy during any part of it; None where that is unknown."""
    kept: bool = False
    """Whether it counts whatever disturbed it, as with --keep-all."""

    @property
    def readings(self) -> tuple[float, ...]:
        """The machine's bandwidth before and after it; empty where nothing looks at that."""
        return ()

    @property
    def drift(self) -> float:
        """How far the readings are apart, relative to the lowest one; 0 without readings."""
        if not self.readings:
            return 0.0
        return max(self.readings) / min(self.readings) - 1

    @property
    def disturbances(self) -> tuple[str, ...]:
        """List what disturbed the work, in the words BUSY and UNSTEADY."""
        found = []
        if (self.foreign_cores or 0.0) > BUSY_CORES:
            found.append(BUSY)
        if self.drift >= MAX_DRIFT:
            found.append(UNSTEADY)
        return tuple(found)

    @property
    def counts(self) -> bool:
        return self.kept or not self.disturbances


class Bracketed(MeasuredRound, frozen=True, kw_only=True):
    """A round of one case, between two readings of the bandwidth."""

    case: str
    number: int
    bandwidth_before: float
    bandwidth_after: float  # both in GB/s

    @property
    def readings(self) -> tuple[float, ...]:
        return self.bandwidth_before, self.bandwidth_after

    @property
    def bandwidth(self) -> float:
        return (self.bandwidth_before + self.bandwidth_after) / 2


def busy_note(foreign_cores: float | None) -> str | None:
    """A sentence for figures that were measured beside the work of others; None if none is
    known."""
    if (foreign_cores or 0.0) <= BUSY_CORES:
        return None
    return (
        f"other programs kept up to {foreign_cores:.1f} cores busy meanwhile: on a quiet machine "
        "the figures differ"
    )


R = TypeVar("R", bound=Bracketed)
M = TypeVar("M", bound=MeasuredRound)
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


@dataclass(slots=True)
class Repeating:
    """How a command goes on when rounds are disturbed; the time for repeating them is shared by all
    of its cases."""

    keep_all: bool = False
    """Whether disturbed rounds count, so that none is repeated."""
    seconds_left: float = REPEAT_SECONDS
    now: Callable[[], float] = time.monotonic

    def rounds(self, make_round: Callable[[int], M], wanted: int) -> Iterator[M]:
        """Rounds 1, 2, ... as they are made, until ``wanted`` of them count or the time for
        repeating is spent. The first ``wanted`` rounds are made in any case; all further ones take
        of that time."""
        counted = number = 0
        while counted < wanted and (number < wanted or self.seconds_left > 0):
            number += 1
            began = self.now()
            done = make_round(number)
            if self.keep_all:
                done = msgspec.structs.replace(done, kept=True)
            if number > wanted:
                self.seconds_left -= self.now() - began
            counted += done.counts
            yield done


def counting_words(rounds: Sequence[MeasuredRound], what: str = "rounds") -> str:
    """How many of them count, and why others do not."""
    words = f"{sum(one.counts for one in rounds)} of {len(rounds)} {what} count"
    disturbed = [one for one in rounds if one.disturbances]
    reasons = Counter(reason for one in disturbed for reason in one.disturbances)
    told = [f"in {count} {_REASONS[reason]}" for reason, count in reasons.items()]
    if told:
        words += f" ({', '.join(told)})"
    return words


def shown_rounds(rounds: Sequence[M]) -> Sequence[M]:
    """The rounds that figures are formed of: those that count or, where none does, all of them."""
    return [one for one in rounds if one.counts] or rounds


def in_states(rounds: Sequence[R]) -> list[tuple[R, str]]:
    """The rounds that figures are formed of, each with its bandwidth state. They stay in their
    order.

    They are the counting rounds of each case. A case without any has all of its rounds, marked as
    not counted. A state is named by the bandwidths seen in it, since those of a virtual machine may
    flip between two levels. Disturbed rounds are states apart.
    """
    by_case: dict[str, list[R]] = {}
    for done in rounds:
        by_case.setdefault(done.case, []).append(done)
    shown = {id(done) for several in by_case.values() for done in shown_rounds(several)}
    chosen = [done for done in rounds if id(done) in shown]
    groups: list[list[R]] = []
    for done in sorted(chosen, key=lambda one: (_mark(one), one.bandwidth)):
        if groups and _is_alike(done, groups[-1][0]):
            groups[-1].append(done)
        else:
            groups.append([done])
    names = {id(done): _state_name(group) for group in groups for done in group}
    return [(done, names[id(done)]) for done in chosen]


def grouped(rounds: Sequence[R], values_of: Callable[[R], Mapping[Key, T]]) -> dict[Key, list[T]]:
    """The values of the rounds that figures are formed of, by their key in a round and the
    bandwidth state."""
    found: dict[Key, list[T]] = {}
    for done, state in in_states(rounds):
        for key, value in values_of(done).items():
            found.setdefault((*key, state), []).append(value)
    return found


def rotated(items: Iterable[T], number: int) -> list[T]:
    """A B C, B C A, C A B ...: in every round another one is the first."""
    found = list(items)
    first = number % len(found)
    return found[first:] + found[:first]


def _is_alike(done: Bracketed, lowest: Bracketed) -> bool:
    """Whether a round belongs to the state of that round, the lowest of its bandwidths."""
    return _mark(done) == _mark(lowest) and done.bandwidth < STATE_WIDTH * lowest.bandwidth


def _mark(done: Bracketed) -> str:
    """Name a state by what its rounds say beside their bandwidth."""
    if not done.counts:
        return "not counted"
    return ", ".join(done.disturbances)


def _state_name(rounds: Sequence[Bracketed]) -> str:
    ends = dict.fromkeys(f"{one.bandwidth:.0f}" for one in (rounds[0], rounds[-1]))
    return ", ".join(filter(None, (f"{'-'.join(ends)} GB/s", _mark(rounds[0]))))
