"""Attention on the CPU in a thread of its own: what it computes, in which order, and with which
threads and cores."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nanoserve.errors import UsageError
from nanoserve.executor.cpu_attention import host_attention
from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
from nanoserve.models.attention import AttentionBatch
from nanoserve.scheduler.optional import HostWork
from tests.executor.host_batches import HostBatch, host_batch

CPU = torch.device("cpu")
ENOUGH = 240.0


@contextmanager
def attending(
    *batches: HostBatch, threads: int = 1, cores: Sequence[int] | None = None
) -> Iterator[HostAttentionThread]:
    """Each batch's pool is a layer."""
    keys, values = [batch.keys for batch in batches], [batch.values for batch in batches]
    host = HostAttentionThread(batches[0].config, keys, values, CPU, threads=threads, cores=cores)
    try:
        yield host
    finally:
        host.close()


def attended(host: HostAttentionThread, batch: HostBatch, layer: int = 0) -> Tensor:
    task = host.attend(layer, batch.query, batch.key, batch.value, batch.rows)
    task.wait()
    return task.result()


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
F32, BF16, F16 = TOLERANCES
SHORT, RAGGED, LONG = (1, 2), (17, 1, 300, 16, 33), (600, 257)


# Every pair of values is in some row: number format, heads, window, block size, contexts.
@pytest.mark.parametrize(
    ("dtype", "heads", "window", "block_size", "contexts"),
    [
        (F32, (4, 4), 0, 1, SHORT),
        (F32, (4, 1), 5, 16, RAGGED),
        (F32, (6, 2), 100, 4, LONG),
        (BF16, (4, 4), 5, 4, RAGGED),
        (BF16, (4, 1), 100, 1, LONG),
        (BF16, (6, 2), 0, 16, SHORT),
        (F16, (4, 4), 100, 16, SHORT),
        (F16, (4, 1), 0, 4, LONG),
        (F16, (6, 2), 5, 1, RAGGED),
        (F32, (6, 2), 0, 16, LONG),
        (BF16, (4, 1), 5, 4, SHORT),
        (F16, (4, 4), 100, 1, RAGGED),
    ],
    ids=str,
)
def test_attention_is_the_definition_of_attention(
    dtype: torch.dtype,
    heads: tuple[int, int],
    window: int,
    block_size: int,
    contexts: tuple[int, ...],
) -> None:
    batch = host_batch(
        contexts,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        window=window,
        block_size=block_size,
        dtype=dtype,
    )
    with attending(batch, threads=2) as host:
        found = attended(host, batch)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), batch.expected, atol=tolerance, rtol=tolerance)
    for pool, written in zip((batch.keys, batch.values), batch.written, strict=True):
        assert torch.equal(pool.nan_to_num(7.0), written.nan_to_num(7.0)), (
            "the new tokens, and nothing else"
        )


def part_of(batch: HostBatch, chosen: list[int]) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:
    rows = batch.rows.pick(torch.tensor(chosen))
    return batch.query[chosen], batch.key[chosen], batch.value[chosen], rows


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_row_does_not_depend_on_others_or_on_the_number_of_threads(dtype: torch.dtype) -> None:
    contexts = (700, 31, 513, 64, 1)
    batch = host_batch(contexts, num_heads=8, head_dim=64, block_size=16, dtype=dtype)
    with attending(batch, threads=2) as host:
        together = attended(host, batch)
        pairs = torch.cat(
            [host_result(host, part_of(batch, chosen)) for chosen in ([3, 0], [4, 1], [2])]
        )
    with attending(batch, threads=1) as host:
        assert torch.equal(attended(host, batch), together)
        assert torch.equal(
            torch.cat([host_result(host, part_of(batch, [row])) for row in range(5)]), together
        )
    assert torch.equal(pairs, together[[3, 0, 4, 1, 2]])


def host_result(
    host: HostAttentionThread, part: tuple[Tensor, Tensor, Tensor, AttentionBatch]
) -> Tensor:
    task = host.attend(0, *part)
    task.wait()
    return task.result()


def test_tasks_are_done_in_the_order_in_which_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [host_batch((5, 9), seed=seed) for seed in range(3)]
    go_on, order = threading.Event(), list[int]()

    def write(
        key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        assert go_on.wait(ENOUGH)
        order.append([batch.keys.data_ptr() for batch in batches].index(key_cache.data_ptr()))
        cache_write(key, value, key_cache, value_cache, slot_mapping)

    cache_write = host_attention.cache_write
    monkeypatch.setattr(host_attention, "cache_write", write)
    with attending(*batches) as host:
        tasks = [
            host.attend(
                layer,
                batches[layer].query,
                batches[layer].key,
                batches[layer].value,
                batches[layer].rows,
            )
            for layer in (2, 0, 1, 2)
        ]
        assert not any(task.ready for task in tasks)
        with pytest.raises(RuntimeError, match="before it was ready"):
            tasks[0].result()
        go_on.set()
        tasks[-1].wait()
        assert all(task.ready for task in tasks)
    assert order == [2, 0, 1, 2]
    for task, layer in zip(tasks, (2, 0, 1, 2), strict=True):
        torch.testing.assert_close(
            task.result().double(), batches[layer].expected, atol=1e-5, rtol=1e-5
        )


def test_results_are_right_while_the_device_computes() -> None:
    """A CPU device is busy with a team of its own meanwhile, and hands over parts of what it
    computes."""
    batches = [host_batch((40, 7, 130), seed=seed) for seed in range(2)]
    matrix = torch.eye(256) * 2
    with attending(*batches, threads=2) as host, torch.inference_mode():
        for _ in range(20):
            tasks = [
                host.attend(
                    layer, batch.query.clone(), batch.key.clone(), batch.value.clone(), batch.rows
                )
                for layer, batch in enumerate(batches)
            ]
            assert torch.equal(matrix @ matrix, matrix * 2)
            for task, batch in zip(tasks, batches, strict=True):
                task.wait()
                torch.testing.assert_close(
                    task.result().double(), batch.expected, atol=1e-5, rtol=1e-5
                )
        assert len(host.take_work()) == 40


def test_work_is_told_once_and_waiting_in_the_queue_is_no_part_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    attend = host_attention.paged_attention

    def slow(*arguments: Tensor, **options: object) -> None:
        clock[0] += 2.0
        attend(*arguments, **options)

    monkeypatch.setattr(host_attention, "paged_attention", slow)
    batch = host_batch((5, 9, 20))
    with attending(batch) as host:
        for _ in range(2):
            last = host.attend(0, batch.query, batch.key, batch.value, batch.rows)
        while not last.ready:
            pass
        assert host.take_work() == (HostWork(3, 34, 2.0), HostWork(3, 34, 2.0))
        assert host.take_work() == ()


def test_its_number_of_threads_is_its_own() -> None:
    before, found = torch.get_num_threads(), dict[str, int]()

    def look(name: str) -> None:
        found[name] = torch.get_num_threads()

    def many() -> None:
        host_attention.set_threads_of_this_thread(before + 3)
        look("own")

    for name, run in (("own", many), ("later", lambda: look("later"))):
        thread = threading.Thread(target=run, name=name)
        thread.start()
        thread.join()
    assert found == {"own": before + 3, "later": before}
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be moved here")
def test_it_runs_on_its_cores_and_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    core, seen = max(allowed), list[tuple[set[int], int]]()
    attend = host_attention.paged_attention

    def spy(*arguments: Tensor, **options: object) -> None:
        seen.append((os.sched_getaffinity(0), torch.get_num_threads()))
        attend(*arguments, **options)

    monkeypatch.setattr(host_attention, "paged_attention", spy)
    batch = host_batch((5,))
    with attending(batch, cores=[core]) as host:
        attended(host, batch)
    assert seen == [({core}, 1)]
    assert os.sched_getaffinity(0) == allowed


def test_cores_that_are_too_few_or_not_there_are_refused() -> None:
    batch = host_batch((5,))
    with (
        pytest.raises(UsageError, match="3 host threads cannot share 2 cores; choose 2 at most"),
        attending(batch, threads=3, cores=[0, 1]),
    ):
        pass
    if hasattr(os, "sched_setaffinity"):
        with (
            pytest.raises(UsageError, match="cannot run on the cores 100000"),
            attending(batch, cores=[100000]),
        ):
            pass
