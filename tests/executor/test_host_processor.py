"""Division of cores, on pretended machines; and threads that are really moved."""

import os
import threading
from pathlib import Path

import pytest
import torch

from nanoserve.errors import UsageError
from nanoserve.executor.cpu_attention import host_processor
from nanoserve.executor.cpu_attention.host_processor import HostProcessor, default_host_threads
from nanoserve.utils.threads import cores_in_use


def machine(
    monkeypatch: pytest.MonkeyPatch, cores: list[tuple[int, ...]], limit: int | None = None
) -> None:
    monkeypatch.setattr(host_processor, "cores_in_use", lambda: cores)
    monkeypatch.setattr(
        host_processor, "physical_cores", lambda: min(len(cores), limit or len(cores))
    )


def test_processors_of_a_core_are_found_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 3},{number % 3 + 3}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 0, 4, 2, 1}, raising=False)
    assert cores_in_use(tmp_path) == [(0,), (1, 4), (2, 5)]


def test_the_host_gets_the_last_cores_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert HostProcessor.divide(1) == HostProcessor(
        1, cores=(3, 7), device_cores=(0, 4, 1, 5, 2, 6), device_threads=3
    )
    assert HostProcessor.divide(3) == HostProcessor(
        3, cores=(1, 5, 2, 6, 3, 7), device_cores=(0, 4), device_threads=1
    )


def test_a_host_that_takes_every_core_shares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [(2,), (3,)])
    assert HostProcessor.divide(2) == HostProcessor(
        2, cores=(2, 3), device_cores=(2, 3), device_threads=1
    )


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [(number,) for number in range(64)], limit=4)
    assert HostProcessor.divide(1) == HostProcessor(
        1, cores=(63,), device_cores=tuple(range(63)), device_threads=3
    )
    assert default_host_threads("cpu") == 2
    with pytest.raises(
        UsageError, match="--host-threads 5: only 4 cores may be used here; choose 4 at most"
    ):
        HostProcessor.divide(5)


@pytest.mark.parametrize(
    ("cores", "cpu", "gpu"), [(1, 1, 1), (2, 1, 1), (3, 1, 1), (5, 2, 3), (64, 32, 62)]
)
def test_how_many_threads_the_host_has_by_default(
    monkeypatch: pytest.MonkeyPatch, cores: int, cpu: int, gpu: int
) -> None:
    machine(monkeypatch, [(number,) for number in range(cores)])
    assert (default_host_threads("cpu"), default_host_threads("cuda")) == (cpu, gpu)
    HostProcessor.divide(cpu)
    HostProcessor.divide(gpu)


def test_one_core_is_too_few_for_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, [(0, 1)])
    with pytest.raises(
        UsageError, match="--host-threads 2: only 1 core may be used here; choose 1 at most"
    ):
        HostProcessor.divide(2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be moved here")
def test_all_threads_of_the_device_move_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    core = min(before)
    end = threading.Event()
    numbers = [threading.get_native_id()]

    def stay(name: str) -> None:
        numbers.append(threading.get_native_id())
        end.wait(240.0)

    def begin(name: str) -> None:
        thread = threading.Thread(target=stay, args=(name,))
        thread.start()
        team.append(thread)
        while len(numbers) < 1 + len(team):
            pass

    team: list[threading.Thread] = []
    begin("made before")
    try:
        torch.set_num_threads(2)
        divided = HostProcessor(1, cores=(core,), device_cores=(core,), device_threads=1)
        monkeypatch.setattr(HostProcessor, "divide", lambda _: divided)
        processor = HostProcessor.set_apart(1, torch.device("cpu"))
        begin("made later")
        assert [os.sched_getaffinity(number) for number in numbers] == [{core}] * 3
        assert torch.get_num_threads() == 1
        os.sched_setaffinity(numbers[2], before)  # as the host's thread does
        processor.close()
        assert [os.sched_getaffinity(number) for number in numbers] == [before] * 3
        assert torch.get_num_threads() == 2
    finally:
        end.set()
        for thread in team:
            thread.join()
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)
