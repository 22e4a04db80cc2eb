"""A thread that attends and fails, hangs, ends or is given up: whoever asks is told, waits for
nothing, and nothing is written any more."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from nanoserve.executor.cpu_attention import host_attention
from nanoserve.executor.cpu_attention.host_attention import (
    HostAttentionLost,
    HostAttentionThread,
    HostTask,
)
from tests.executor.host_batches import HostBatch, host_batch

ENOUGH = 240.0


class Gate:
    """An operator that does not get through before the gate opens."""

    def __init__(self, operator: Callable[..., None]) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self._operator = operator

    def __call__(self, *arguments: object, **options: object) -> None:
        self.reached.set()
        assert self.open.wait(ENOUGH)
        self._operator(*arguments, **options)


@pytest.fixture
def batch() -> HostBatch:
    return host_batch((5, 9))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Attention hangs; it goes on when the test is over."""
    gate = Gate(host_attention.paged_attention)
    monkeypatch.setattr(host_attention, "paged_attention", gate)
    yield gate
    gate.open.set()


def start(batch: HostBatch, patience: float = ENOUGH) -> HostAttentionThread:
    return HostAttentionThread(
        batch.config,
        [batch.keys],
        [batch.values],
        torch.device("cpu"),
        threads=1,
        patience=patience,
    )


def give(host: HostAttentionThread, batch: HostBatch) -> HostTask:
    return host.attend(0, batch.query, batch.key, batch.value, batch.rows)


def wait_for_problem(host: HostAttentionThread) -> str:
    until = time.monotonic() + ENOUGH
    while (problem := host.problem) is None:
        assert time.monotonic() < until, "nobody noticed"
        time.sleep(0.005)
    return problem


def test_what_an_operator_raises_is_told_to_all_who_wait(
    batch: HostBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Tensor, **options: object) -> None:
        raise RuntimeError("no such block\nwith a long explanation")

    monkeypatch.setattr(host_attention, "paged_attention", fail)
    host = start(batch)
    tasks = [give(host, batch) for _ in range(2)]
    for task in tasks:
        with pytest.raises(
            HostAttentionLost, match=r"^attention on the CPU failed: no such block$"
        ):
            task.wait()
        with pytest.raises(HostAttentionLost):
            _ = task.ready
    host.close()


def test_a_hanging_operator_is_a_problem_when_patience_is_over(
    batch: HostBatch, stuck: Gate
) -> None:
    host = start(batch, patience=0.05)
    task = give(host, batch)
    with pytest.raises(HostAttentionLost, match="attention on the CPU has hung for"):
        task.wait()
    assert host.problem == host.problem, "it stays what it was"
    host.close()


def test_many_tasks_that_wait_their_turn_do_not_hang(
    batch: HostBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they take longer than patience, each takes less."""
    attend = host_attention.paged_attention

    def slow(*arguments: Tensor, **options: object) -> None:
        clock[0] += 0.6
        attend(*arguments, **options)

    monkeypatch.setattr(host_attention, "paged_attention", slow)
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    host = start(batch, patience=1.0)
    tasks = [give(host, batch) for _ in range(5)]
    while not tasks[-1].ready:
        pass
    host.close()


def test_a_process_that_was_stopped_has_not_hung(
    batch: HostBatch, stuck: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps far beyond patience; then the thread goes on as everything else does."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    host = start(batch)
    task = give(host, batch)
    assert stuck.reached.wait(ENOUGH)
    clock[0] += 10 * ENOUGH
    assert host.problem is None
    clock[0] += host_attention.SECOND_LOOK / 2
    assert host.problem is None
    stuck.open.set()
    while not task.ready:
        pass
    clock[0] += 10 * ENOUGH
    assert host.problem is None, "with nothing under way it may rest as long as it likes"
    host.close()


def test_a_stopped_clock_is_looked_at_twice_and_no_more(
    batch: HostBatch, stuck: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    host = start(batch)
    give(host, batch)
    clock[0] += ENOUGH + 1
    assert host.problem is None
    clock[0] += host_attention.SECOND_LOOK
    assert host.problem == "attention on the CPU has hung for 242 s"
    monkeypatch.undo()
    host.close()


def test_a_thread_that_ended_is_noticed(batch: HostBatch) -> None:
    host = start(batch)
    host._tasks.put(None)
    task = give(host, batch)
    assert wait_for_problem(host) == "the thread that attends on the CPU has ended"
    with pytest.raises(HostAttentionLost, match="has ended"):
        task.wait()
    host.close()


def test_a_thread_that_was_given_up_writes_nothing_when_it_wakes(
    batch: HostBatch, stuck: Gate
) -> None:
    """It hangs while it attends; behind it waits a task that would write."""
    host = start(batch, patience=0.05)
    give(host, batch)
    assert stuck.reached.wait(ENOUGH)
    batch.keys.fill_(3.0)
    batch.values.fill_(3.0)
    give(host, batch)
    wait_for_problem(host)
    host.close()
    assert host._thread.is_alive(), "it does not wait for what hangs"
    stuck.open.set()
    host._thread.join(ENOUGH)
    assert not host._thread.is_alive()
    assert bool((batch.keys == 3.0).all()) and bool((batch.values == 3.0).all())


def test_a_problem_alone_gives_the_thread_up(batch: HostBatch, stuck: Gate) -> None:
    """The next thread may use the pool before this one was closed."""
    host = start(batch, patience=0.05)
    give(host, batch)
    assert stuck.reached.wait(ENOUGH)
    batch.keys.fill_(3.0)
    give(host, batch)
    wait_for_problem(host)
    stuck.open.set()
    host._thread.join(ENOUGH)
    assert bool((batch.keys == 3.0).all())
    host.close()


def test_closing_drops_what_waits_and_says_so(batch: HostBatch, stuck: Gate) -> None:
    host = start(batch)
    give(host, batch)
    assert stuck.reached.wait(ENOUGH)
    waiting = give(host, batch)
    threading.Timer(0.05, stuck.open.set).start()
    host.close()
    assert not host._thread.is_alive()
    with pytest.raises(HostAttentionLost, match="closed"):
        waiting.wait()
    host.close()


def test_closing_waits_for_a_write_that_has_begun(
    batch: HostBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(host_attention.cache_write)
    monkeypatch.setattr(host_attention, "cache_write", gate)
    host = start(batch)
    give(host, batch)
    assert gate.reached.wait(ENOUGH)
    threading.Timer(0.05, gate.open.set).start()
    host.close()
    assert torch.equal(batch.keys.nan_to_num(7.0), batch.written[0].nan_to_num(7.0))
