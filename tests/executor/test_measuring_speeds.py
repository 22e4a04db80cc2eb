"""The speeds of a machine that is made up: what comes out must be what it was made with."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanoserve.executor.profiling import measuring_speeds, timers
from nanoserve.executor.profiling.measuring_speeds import measure_speeds
from nanoserve.models.decoder import SingleRank

WORKERS = 4
LATENCY, BUS_BANDWIDTH = 50e-6, 0.5e9
READING, COMPUTING = 8e9, 200e9
COPIED = 256


@dataclass
class Clock:
    """It advances when something is done that takes time, and a little whenever one looks at it."""

    now: float = 0.0
    look: float = 1e-5

    def perf_counter(self) -> float:
        self.now += self.look
        return self.now


class Group(SingleRank):
    """One of several workers that all have the same numbers; its sums take what the constants
    say."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def all_reduce(self, tensor: Tensor) -> Tensor:
        moved = 2 * (WORKERS - 1) / WORKERS * tensor.nbytes
        # a tree of four is two messages high
        self.clock.now += 2 * 2 * LATENCY + moved / BUS_BANDWIDTH
        return WORKERS * tensor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Clock of a machine whose products, and messages between workers, take what the constants
    say."""
    clock = Clock()

    def project(rows: Tensor, weights: Tensor) -> None:
        clock.now += max(weights.nbytes / READING, 2 * len(rows) * weights.numel() / COMPUTING)

    monkeypatch.setattr(timers, "time", clock)
    monkeypatch.setattr(measuring_speeds, "project", project)
    # takes no time, so it is done often
    monkeypatch.setattr(measuring_speeds, "_COPIED_BYTES", COPIED)
    return clock


def test_a_group_finds_the_speeds_that_the_cost_model_asks_for(clock: Clock) -> None:
    found = measure_speeds(torch.device("cpu"), torch.float32, Group(clock), WORKERS)
    assert found.link_latency == pytest.approx(LATENCY, rel=0.02)
    assert found.link_bandwidth == pytest.approx(BUS_BANDWIDTH, rel=0.02)
    assert found.memory_bandwidth == pytest.approx(READING, rel=0.02)
    assert found.flops == pytest.approx(COMPUTING, rel=0.02)
    assert clock.now < 1


def test_copies_are_counted_once(clock: Clock) -> None:
    # nothing else takes time: a copy of an eighth is as long as a look at the clock
    clock.look = 1e-3
    found = measure_speeds(torch.device("cpu"), torch.float32)
    assert found.host_link_bandwidth == pytest.approx(COPIED / 8 / 1e-3, rel=0.1)


def test_workers_take_the_mean_of_what_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each the same, or they would not be told the same of the times to come."""
    group = SingleRank()
    monkeypatch.setattr(group, "all_reduce", lambda tensor: tensor + torch.tensor([30.0, 2.0]))
    assert measuring_speeds._Together(torch.device("cpu"), group, 2).mean(10.0, 4.0) == [20.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_machine_has_speeds(dtype: torch.dtype) -> None:
    found = measure_speeds(torch.device("cpu"), dtype)
    assert found.link_latency == 0.0
    assert min(found.memory_bandwidth, found.flops, found.host_link_bandwidth) > 0
