"""Queries, keys and values on their way to the CPU and back, also from a pretended GPU: its stream
does what it was told only when somebody waits for it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread, QkvTransfer
from tests.executor.host_batches import HostBatch, host_batch

COPY, EMPTY = Tensor.copy_, torch.empty
GPU = torch.device("cuda")
COPYING_MS = 250.0


class LazyStream:
    """Keeps what is issued until an event behind it is waited for."""

    def __init__(self) -> None:
        self.issued: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.issued[self.done - 1]()


class LazyEvent:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.place = 0
        self.waited_in: str | None = None

    def record(self, stream: LazyStream) -> None:
        self.stream, self.place = stream, len(stream.issued)

    def synchronize(self) -> None:
        self.waited_in = threading.current_thread().name
        self.stream.run(self.place)

    def elapsed_time(self, later: "LazyEvent") -> float:
        assert self.place + 3 == later.place, "around the three copies"
        return COPYING_MS


class PretendedGpu:
    """Attributes:
    pinned: addresses of memory that was asked for pinned.
    back: what was brought back to the device, without waiting.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = LazyStream()
        self.events: list[LazyEvent] = []
        self.pinned: set[int] = set()
        self.back: list[Tensor] = []

        def event(**options: bool) -> LazyEvent:
            self.events.append(LazyEvent(**options))
            return self.events[-1]

        def empty(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            found: Tensor = EMPTY(*shape, **options)
            self.pinned |= {found.data_ptr()} if pin_memory else set()
            return found

        def copy(target: Tensor, source: Tensor, *, non_blocking: bool) -> Tensor:
            assert non_blocking and target.data_ptr() in self.pinned
            self.stream.issued.append(lambda: COPY(target, source))
            return target

        def to(source: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
            assert device == GPU and non_blocking and source.data_ptr() in self.pinned
            self.back.append(source)
            return source

        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "Event", event)
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(Tensor, "copy_", copy)
        monkeypatch.setattr(Tensor, "to", to)


@pytest.fixture
def batch() -> HostBatch:
    return host_batch((5, 9, 2))


def test_on_a_cpu_nothing_is_copied(batch: HostBatch) -> None:
    handed = QkvTransfer(batch.query, batch.key, batch.value, torch.device("cpu"))
    given = batch.query, batch.key, batch.value
    assert [tensor.data_ptr() for tensor in handed.take()] == [
        tensor.data_ptr() for tensor in given
    ]
    room = handed.make_room()
    assert room.shape == (3, 4 * 16) and room.dtype == batch.query.dtype
    assert handed.bring_back(room) is room


def test_from_a_gpu_all_passes_through_pinned_memory(
    batch: HostBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = PretendedGpu(monkeypatch)
    handed = QkvTransfer(batch.query, batch.key, batch.value, GPU)
    assert (len(gpu.stream.issued), gpu.stream.done) == (3, 0), (
        "three copies are issued, nobody has waited"
    )
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    taken = handed.take()
    for found, given in zip(taken, (batch.query, batch.key, batch.value), strict=True):
        assert torch.equal(found, given) and found.data_ptr() in gpu.pinned
    assert handed.began == 100.0 - COPYING_MS / 1000, (
        "waiting for the device is no work, copying is"
    )
    room = handed.make_room()
    assert room.data_ptr() in gpu.pinned
    handed.bring_back(room)
    assert gpu.back == [room]


def test_the_thread_waits_for_the_gpu_and_nobody_else_does(
    batch: HostBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = PretendedGpu(monkeypatch)
    host = HostAttentionThread(batch.config, [batch.keys], [batch.values], GPU, threads=1)
    try:
        task = host.attend(0, batch.query, batch.key, batch.value, batch.rows)
        task.wait()
        assert gpu.back == []
        result = task.result()
    finally:
        host.close()
    monkeypatch.undo()
    assert [event.waited_in for event in gpu.events] == [None, "host-attention"]
    torch.testing.assert_close(result.double(), batch.expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(batch.keys.nan_to_num(7.0), batch.written[0].nan_to_num(7.0))
