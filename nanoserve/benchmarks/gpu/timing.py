"""Times of calls on the device, in turns and with cold caches, as a median with extremes; and its measured limits."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.rounds import rotated

FLUSH_BYTES = 2**30
"""Read before every timed call, once and more: many times the largest level-2 cache."""
MOST_FLUSHES = 16
"""A call that waits for the device itself has no use for more."""
_LEAD = 2.0
"""Times what the host took to launch the call when nothing else was to be done."""
_WARM_UP_CALLS = 2
_SECONDS = 1.0
_FEWEST_TURNS, _MOST_TURNS = 5, 30
_DRY_TURNS = 2
_MICROSECONDS = 1e6

Call = Callable[[], object]


class TimeSpread(msgspec.Struct, frozen=True):
    """Several times of the same call, in microseconds."""

    us: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: list[float]) -> "TimeSpread":
        """`us` is the median."""
        ordered = [one * _MICROSECONDS for one in seconds]
        return cls(statistics.median(ordered), min(ordered), max(ordered), len(ordered))


class HostClock:
    """Starts a call, and tells its seconds once asked. This one tells wall-clock time on the CPU, for dry runs."""

    def start(self, call: Call, *, launch_seconds: float = 0.0) -> Callable[[], float]:
        """launch_seconds: what the host takes for the call, where that is known."""
        began = time.perf_counter()
        call()
        ended = time.perf_counter()
        return lambda: ended - began


class EventClock(HostClock):
    """CUDA events around the call, whose inputs no cache holds, and which the host has launched by then.

    A call of many small kernels (blocks of several layers, one after another) takes the host longer than the device:
    timed from an idle device it would show the host. So the device first reads for longer than the launching takes.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(FLUSH_BYTES // 4, device=device)
        self._flush()  # which loads what it runs
        self._flush_seconds = _between_events(self._flush)()

    def start(self, call: Call, *, launch_seconds: float = 0.0) -> Callable[[], float]:
        for _ in range(flushes_needed(launch_seconds, self._flush_seconds)):
            self._flush()
        return _between_events(call)

    def _flush(self) -> None:
        self._numbers.amax()  # reading, so that the cache is left without lines that the call would have to write back


def flushes_needed(launch_seconds: float, flush_seconds: float) -> int:
    """How many flushes keep the device busy until the host has surely launched a call behind them."""
    return min(MOST_FLUSHES, max(1, math.ceil(_LEAD * launch_seconds / flush_seconds)))


def _between_events(call: Call) -> Callable[[], float]:
    make: Any = torch.cuda.Event  # which torch leaves untyped
    began, ended = make(enable_timing=True), make(enable_timing=True)
    began.record()
    call()
    ended.record()

    def seconds() -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    return seconds


@torch.inference_mode()
def take_turns(routes: Mapping[str, Call], clock: HostClock, *, dry_run: bool) -> dict[str, TimeSpread]:
    """A B C, B C A, C A B ...: each route's times, after calls that warm it up and are not counted."""
    estimate, launch_seconds = 0.0, {}
    for name, call in routes.items():
        for _ in range(_WARM_UP_CALLS):
            clock.start(call)()
        began = time.perf_counter()
        seconds = clock.start(call)
        launch_seconds[name] = time.perf_counter() - began
        estimate += seconds()
    turns = max(_FEWEST_TURNS, min(_MOST_TURNS, round(_SECONDS / max(estimate, 1e-6))))
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in routes}
    for turn in range(_DRY_TURNS if dry_run else turns):
        for name in rotated(routes, turn):
            pending[name].append(clock.start(routes[name], launch_seconds=launch_seconds[name]))
    return {name: TimeSpread.of([seconds() for seconds in started]) for name, started in pending.items()}


COPY_BYTES, PRODUCT_SIZE = 2**31, 8192
_DRY_COPY_BYTES, _DRY_PRODUCT_SIZE = 2**20, 64


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """A device, its clock, and what it can do at best."""

    setting: GpuSetting
    clock: HostClock
    limits: Limits

    @classmethod
    def on(cls, setting: GpuSetting, report: Report) -> "DeviceTimer":
        """Measure the limits of the device, and report them in 10^9 bytes and 10^12 operations per second.

        They are the fastest copy within its memory (bytes read plus bytes written), and the fastest product of two
        square matrices of random numbers (two operations for each multiply-add).
        """
        clock = HostClock() if setting.dry_run else EventClock(setting.device)
        copied = _DRY_COPY_BYTES if setting.dry_run else COPY_BYTES
        size = _DRY_PRODUCT_SIZE if setting.dry_run else PRODUCT_SIZE
        source = torch.ones(copied // 4, device=setting.device)
        target = torch.empty_like(source)
        factor = torch.randn(size, size, device=setting.device).to(setting.dtype)
        routes = {"copy": lambda: target.copy_(source), "product": lambda: factor @ factor}
        times = take_turns(routes, clock, dry_run=setting.dry_run)
        limits = Limits(2 * copied / (times["copy"].low / 1e6), 2 * size**3 / (times["product"].low / 1e6))
        fields = {"copy_gb_per_s": limits.bytes_per_second / 1e9, "matmul_tflops": limits.operations_per_second / 1e12}
        report.put("limits", fields)
        return cls(setting, clock, limits)

    def times(self, routes: Mapping[str, Call]) -> dict[str, TimeSpread]:
        """Times of these routes, which take turns."""
        return take_turns(routes, self.clock, dry_run=self.setting.dry_run)
