"""The device that is measured: times of calls in turns and with cold caches, and what the device
can do at best."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec
import torch

from nanoserve.executor.start.model_loading import usable_gpu, use_writable_triton_cache
from nanoserve.lab.benchmarks.floors import Limits
from nanoserve.lab.benchmarks.rounds import rotated

# read before every timed call, once or more: many times the largest level-2 cache
FLUSH_BYTES = 2**30
MOST_FLUSHES = 16  # a call that waits for the device itself needs no more
# the device is kept busy for this many times the time that the host takes to launch the call
_LEAD = 2.0
_WARM_UP_CALLS = 2
_SECONDS = 1.0
_FEWEST_TURNS, _MOST_TURNS = 5, 30
_DRY_TURNS = 2
COPY_BYTES, PRODUCT_SIZE = 2**31, 8192
_DRY_COPY_BYTES, _DRY_PRODUCT_SIZE = 2**20, 64
INSTEAD = "try it on the CPU with --dry-run"

Call = Callable[[], object]
Clock = Callable[[Call, float], Callable[[], float]]
"""Starts a call, of which the host's launch seconds are given, and returns what waits for its
seconds."""


class TimeSpread(msgspec.Struct, frozen=True):
    """Several times of the same call, in microseconds."""

    us: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: list[float]) -> "TimeSpread":
        """`us` is the median."""
        times = [1e6 * one for one in seconds]
        return cls(statistics.median(times), min(times), max(times), len(times))


def time_on_host(call: Call, launch_seconds: float) -> Callable[[], float]:
    """A clock for dry runs: wall-clock time on the CPU."""
    began = time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    return lambda: seconds


class EventClock:
    """CUDA events around a call whose inputs no cache holds, and which the host has launched by
    then. A call of many small kernels (blocks of several layers, one after another) takes the host
    longer than the device: timed from an idle device it would show the host. So the device first
    reads for longer than the launching takes."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(FLUSH_BYTES // 4, device=device)
        self._flush()  # which loads what it runs
        self._flush_seconds = _between_events(self._flush)()

    def __call__(self, call: Call, launch_seconds: float) -> Callable[[], float]:
        for _ in range(flushes_needed(launch_seconds, self._flush_seconds)):
            self._flush()
        return _between_events(call)

    def _flush(self) -> None:
        # reading, so that the cache is left without lines that the call would have to write back
        self._numbers.amax()


def flushes_needed(launch_seconds: float, flush_seconds: float) -> int:
    """How many flushes keep the device busy until the host has surely launched a call behind
    them."""
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
def take_turns(routes: Mapping[str, Call], clock: Clock, *, dry_run: bool) -> dict[str, TimeSpread]:
    """A B C, B C A, C A B ...: each route's times, after calls that warm it up and are not
    counted."""
    estimate, launch_seconds = 0.0, {}
    for name, call in routes.items():
        for _ in range(_WARM_UP_CALLS):
            clock(call, 0.0)()
        began = time.perf_counter()
        seconds = clock(call, 0.0)
        launch_seconds[name] = time.perf_counter() - began
        estimate += seconds()
    turns = max(_FEWEST_TURNS, min(_MOST_TURNS, round(_SECONDS / max(estimate, 1e-6))))
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in routes}
    if dry_run:
        turns = _DRY_TURNS
    for turn in range(turns):
        for name in rotated(routes, turn):
            pending[name].append(clock(routes[name], launch_seconds[name]))
    return {
        name: TimeSpread.of([seconds() for seconds in started]) for name, started in pending.items()
    }


class GpuBench:
    """A device, its clock and its limits. In a dry run the CPU stands in for the GPU, and no figure
    means anything."""

    def __init__(self, device: torch.device, *, dry_run: bool) -> None:
        self.device, self.dry_run = device, dry_run
        self.dtype = torch.bfloat16
        if dry_run:
            self.dtype = torch.float32

    @classmethod
    def open(cls, *, dry_run: bool, asked: str = "bench gpu", instead: str = INSTEAD) -> "GpuBench":
        """The GPU of this process, or the CPU. Raises UsageError, which says who asked and what to
        do instead, if there is no GPU that the kernels run on."""
        if dry_run:
            return cls(torch.device("cpu"), dry_run=True)
        device = usable_gpu(None, asked=asked, instead=instead)
        use_writable_triton_cache()
        return cls(device, dry_run=False)

    def facts(self) -> dict[str, Any]:
        if self.dry_run:
            return {"name": "no GPU (dry run on the CPU)"}
        properties: Any = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "cuda": torch.version.cuda,
        }

    def give_back(self) -> bool:
        """Give memory that torch keeps for nothing back to the device; False if the device, or what
        is left of torch after an error, cannot even do that: only a new process can go on then."""
        try:
            self.synchronize()
            gc.collect()
            if not self.dry_run:
                torch.cuda.empty_cache()
        # a kernel's error stays until the process ends, as does an allocator's failed recording
        except RuntimeError:
            return False
        return True

    def synchronize(self) -> None:
        """Wait until the device has done everything; raises torch's error if it failed at that."""
        if not self.dry_run:
            torch.cuda.synchronize(self.device)

    def times(self, routes: Mapping[str, Call]) -> dict[str, TimeSpread]:
        """Times of these routes, which take turns. The memory that the clock reads is held no
        longer."""
        if self.dry_run:
            return take_turns(routes, time_on_host, dry_run=True)
        return take_turns(routes, EventClock(self.device), dry_run=False)

    @cached_property
    def limits(self) -> Limits:
        """The fastest copy within the device's memory (bytes read plus bytes written), and the
        fastest product of two square matrices of random numbers (two operations for each
        multiply-add), measured now."""
        copied, size = COPY_BYTES, PRODUCT_SIZE
        if self.dry_run:
            copied, size = _DRY_COPY_BYTES, _DRY_PRODUCT_SIZE
        source = torch.ones(copied // 4, device=self.device)
        target = torch.empty_like(source)
        factor = torch.randn(size, size, device=self.device).to(self.dtype)
        times = self.times(
            {"copy": lambda: target.copy_(source), "product": lambda: factor @ factor}
        )
        copy_seconds, product_seconds = times["copy"].low / 1e6, times["product"].low / 1e6
        return Limits(2 * copied / copy_seconds, 2 * size**3 / product_seconds)
