"""Times of calls on the device: behind a cold cache, in turns, as a median with its extremes."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import torch

from nanoserve.benchmarks.gpu.setting import Setting

FLUSH_BYTES = 2**30
"""Read before every timed call: many times the largest level-2 cache, and long enough (0.2 ms and more) that the host
has launched the call before the device comes to it."""
_WARM_UP_CALLS = 2
_SECONDS = 1.0
_FEWEST_TURNS, _MOST_TURNS = 5, 30
_DRY_TURNS = 2
_MICROSECONDS = 1e6

Call = Callable[[], object]


class Spread(msgspec.Struct, frozen=True):
    """Several times of the same call, in microseconds."""

    us: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Spread":
        """`us` is the median."""
        ordered = [one * _MICROSECONDS for one in seconds]
        return cls(statistics.median(ordered), min(ordered), max(ordered), len(ordered))


class Clock(Protocol):
    """Starts a call, and tells its seconds once asked: until then the host need not wait for the device."""

    name: str

    def start(self, call: Call) -> Callable[[], float]: ...


class EventClock:
    """CUDA events around the call, whose inputs no cache holds."""

    name = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.zeros(FLUSH_BYTES // 4, device=device)

    def start(self, call: Call) -> Callable[[], float]:
        self._flush.amax()  # reading, so that the cache is left without lines that the call would have to write back
        make: Any = torch.cuda.Event  # which torch leaves untyped
        began, ended = make(enable_timing=True), make(enable_timing=True)
        began.record()
        call()
        ended.record()

        def seconds() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1000

        return seconds


class HostClock:
    """Wall-clock time on the CPU: for dry runs."""

    name = "perf_counter (dry run)"

    def start(self, call: Call) -> Callable[[], float]:
        began = time.perf_counter()
        call()
        ended = time.perf_counter()
        return lambda: ended - began


def make_clock(setting: Setting) -> Clock:
    """The clock of a setting's device."""
    return HostClock() if setting.dry_run else EventClock(setting.device)


@torch.inference_mode()
def take_turns(routes: Mapping[str, Call], clock: Clock, *, dry_run: bool) -> dict[str, Spread]:
    """A B C, B C A, C A B ...: each route's times, after calls that warm it up and are not counted."""
    estimate = 0.0
    for call in routes.values():
        for _ in range(_WARM_UP_CALLS):
            clock.start(call)()
        estimate += clock.start(call)()
    turns = max(_FEWEST_TURNS, min(_MOST_TURNS, round(_SECONDS / max(estimate, 1e-6))))
    names = list(routes)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for turn in range(_DRY_TURNS if dry_run else turns):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            pending[name].append(clock.start(routes[name]))
    return {name: Spread.of([seconds() for seconds in started]) for name, started in pending.items()}
