"""The cores of a machine, divided among its workers."""

import pytest

from nanoserve.executor.workers.building import part_of


def test_every_core_is_somebodys_and_nobody_has_many_more_than_others() -> None:
    cores = [(number, number + 20) for number in range(20)]
    for count in range(1, 21):
        for workers in range(1, count + 1):
            parts = [part_of(cores[:count], number, workers) for number in range(workers)]
            assert [core for part in parts for core in part] == cores[:count]
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [3, 5])
def test_with_more_workers_than_cores_some_share_one(workers: int) -> None:
    parts = [part_of([(0,), (1,)], number, workers) for number in range(workers)]
    assert {len(part) for part in parts} == {1}
    assert {core for part in parts for core in part} == {(0,), (1,)}
