"""HostLink: what moves between the devices and host memory, one thing after another in each direction."""

from typing import Literal

from nanoserve.simulator.pipeline import Passage

Direction = Literal["out", "in"]


class HostLink:
    """A full-duplex link: "out", from the devices to the host, and "in" do not hinder each other.

    Every device has such a link of its own, and all devices move their part of a transfer at once, so one clock for
    each direction stands for all of them; the host's memory is taken to keep up with them all. Copies run beside
    computing and do not slow it down.
    """

    def __init__(self) -> None:
        self._free: dict[Direction, float] = {"out": 0.0, "in": 0.0}

    @property
    def free(self) -> float:
        """Time at which everything that has begun is over, in seconds."""
        return max(self._free.values())

    def move(self, direction: Direction, seconds: float, now: float) -> Passage:
        """Queue a transfer behind those of its direction; returns from when to when it moves."""
        start = max(now, self._free[direction])
        end = self._free[direction] = start + seconds
        return Passage(start, end)
