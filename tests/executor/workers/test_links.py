"""Sockets between workers, and the sums that go over them. The workers are threads of this
process."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.executor.workers.distributed import RankGroup
from nanoserve.executor.workers.links import Links

Result = TypeVar("Result")
HOST = "127.0.0.1"
HERE = threading.local()


@pytest.fixture
def store() -> Iterator[Any]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=240))
    yield store


def on_workers(number: int, store: Any, work: Callable[[int, Links], Result]) -> list[Result]:
    def run(rank: int) -> Result:
        HERE.rank = rank
        return work(rank, Links.open(store, rank, number, HOST))

    with ThreadPoolExecutor(number) as threads, torch.inference_mode():
        return list(threads.map(run, range(number)))


def numbers(rank: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("rows", [1, 2**17], ids=["small", "larger than all buffers on the way"])
def test_all_send_before_any_receives(store: Any, rows: int) -> None:
    def work(rank: int, links: Links) -> bool:
        others = {0, 1, 2} - {rank}
        received = {peer: torch.empty(rows, 64, dtype=torch.bfloat16) for peer in others}
        links.exchange(dict.fromkeys(others, numbers(rank, rows)), received)
        return all(torch.equal(tensor, numbers(peer, rows)) for peer, tensor in received.items())

    assert on_workers(3, store, work) == [True] * 3


def test_what_is_empty_or_has_gaps_is_sent_too(store: Any) -> None:
    wide = numbers(7, 4)

    def work(rank: int, links: Links) -> Tensor:
        received = torch.empty(4, 32, dtype=torch.bfloat16)
        links.exchange({1 - rank: wide[:0]}, {1 - rank: torch.empty(0, 64, dtype=torch.bfloat16)})
        links.exchange({1 - rank: wide[:, ::2]}, {1 - rank: received})
        return received

    assert all(torch.equal(received, wide[:, ::2]) for received in on_workers(2, store, work))


def test_strangers_do_not_disturb_a_start(store: Any) -> None:
    """One says nothing, one something wrong, and one is gone at once."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(Links.open, store, 0, 2, HOST)
        port = int(bytes(store.get("link/0")).rpartition(b":")[2])
        silent, wrong, gone = (socket.create_connection((HOST, port)) for _ in range(3))
        wrong.sendall(bytes(20))
        gone.close()
        second = threads.submit(Links.open, store, 1, 2, HOST)
        received = torch.zeros(3)
        second.result(30).exchange({0: torch.arange(3.0)}, {})
        first.result(30).exchange({}, {1: received})
    silent.close()
    wrong.close()
    assert received.tolist() == [0, 1, 2]


def test_a_worker_that_is_gone_is_named_at_once(store: Any) -> None:
    def work(rank: int, links: Links) -> None:
        if rank == 1:
            links._sockets[0].close()
            return
        with pytest.raises(RuntimeError, match=r"^the link to worker 1 broke"):
            links.exchange({}, {1: torch.empty(1)})

    on_workers(2, store, work)


@pytest.fixture
def ringed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Groups whose processes are threads; the sizes of what is left to torch.distributed."""
    sizes = list[int]()
    monkeypatch.setattr(dist, "new_group", lambda workers: workers)
    monkeypatch.setattr(dist, "get_rank", lambda: HERE.rank)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sizes.append(tensor.nbytes))
    yield sizes


@pytest.mark.parametrize("degree", [2, 3])
def test_every_rank_gets_the_same_bits(store: Any, ringed: list[int], degree: int) -> None:
    """Numbers of a sum whose value depends on the order, and is near the true one."""
    exact = sum(numbers(rank, 9, torch.float32) for rank in range(degree))
    found = on_workers(
        degree,
        store,
        lambda rank, links: RankGroup(range(degree), links).all_reduce(numbers(rank, 9)).clone(),
    )
    torch.testing.assert_close(found[0].float(), exact, atol=0.05, rtol=0.02)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert not ringed


def test_more_than_two_ranks_leave_large_sums_to_a_ring(store: Any, ringed: list[int]) -> None:
    rows = 2**16 // 128
    on_workers(
        3, store, lambda rank, links: RankGroup(range(3), links).all_reduce(numbers(rank, rows))
    )
    assert not ringed
    on_workers(
        3,
        dist.HashStore(),
        lambda rank, links: RankGroup(range(3), links).all_reduce(numbers(rank, rows + 1)),
    )
    assert ringed == [2**16 + 128] * 3


def test_logits_stand_side_by_side_on_the_first_rank(store: Any, ringed: list[int]) -> None:
    """In the second of two stages; the other stage's workers have links too."""

    def work(rank: int, links: Links) -> Tensor | None:
        return RankGroup(range(2, 4), links).gather(numbers(rank, 5)) if rank > 1 else None

    nothing, other, first, second = on_workers(4, store, work)
    assert nothing is other is second is None
    assert first is not None and torch.equal(
        first, torch.cat([numbers(2, 5), numbers(3, 5)], dim=1)
    )
