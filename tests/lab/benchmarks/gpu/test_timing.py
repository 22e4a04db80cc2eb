"""Timing is of the device: it is kept busy until the host has launched the call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanoserve.lab.benchmarks.gpu.device import (
    MOST_FLUSHES,
    Call,
    EventClock,
    flushes_needed,
    take_turns,
)


@pytest.mark.parametrize(
    ("launch_seconds", "flushes"),
    [(0.0, 1), (90e-6, 1), (110e-6, 2), (350e-6, 4), (1.0, MOST_FLUSHES)],
)
def test_the_device_reads_for_twice_as_long_as_the_host_launches(
    launch_seconds: float, flushes: int
) -> None:
    assert flushes_needed(launch_seconds, flush_seconds=200e-6) == flushes


def test_the_flushes_lie_in_front_of_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        """Event of a device that takes 0.2 ms for everything."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, later: "Event") -> float:
            return 0.2

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.device.FLUSH_BYTES", 64)
    monkeypatch.setattr(EventClock, "_flush", lambda self: log.append("flush"))
    clock = EventClock(torch.device("cpu"))
    log.clear()
    seconds = clock(lambda: log.append("call"), 250e-6)
    assert log == ["flush", "flush", "flush", "event", "call", "event"]
    assert seconds() == pytest.approx(200e-6) and log[-1] == "wait"


def test_each_route_gets_the_lead_that_its_own_launching_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Watch:
        """Stands still but while the slow one is launched."""

        now = 0.0

        def perf_counter(self) -> float:
            return self.now

        def launch_slowly(self) -> None:
            self.now += 0.02

    watch = Watch()
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.device.time", watch)

    class Clock:
        def __init__(self) -> None:
            self.leads: dict[Call, list[float]] = {}

        def __call__(self, call: Call, launch_seconds: float) -> Callable[[], float]:
            call()
            self.leads.setdefault(call, []).append(launch_seconds)
            return lambda: 1e-3

    clock = Clock()
    routes: dict[str, Any] = {"slow": watch.launch_slowly, "fast": lambda: None}
    spreads = take_turns(routes, clock, dry_run=True)
    slow, fast = (clock.leads[routes[name]] for name in ("slow", "fast"))
    assert slow[:3] == fast[:3] == [0.0] * 3  # not known yet
    assert (
        len(slow) == len(fast) == 5
        and min(slow[3:]) == pytest.approx(0.02)
        and fast[3:] == [0.0] * 2
    )
    assert spreads["slow"].n == 2 and spreads["slow"].us == pytest.approx(1000)
