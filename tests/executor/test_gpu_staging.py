"""The way through staging, with a pretended GPU: its stream does what it was told only when
somebody waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from nanoserve.executor.kv_transfer import gpu_staging
from nanoserve.executor.kv_transfer.gpu_staging import block_arrays

LAYERS, HEADS, BLOCK_SIZE, HEAD_DIM = 3, 2, 2, 4
BLOCK_SHAPE = (LAYERS, 2, HEADS, BLOCK_SIZE, HEAD_DIM)
COPY = Tensor.copy_
AT_ONCE: gpu_staging.Ready = [(slice(None), None)]
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK_SIZE * HEAD_DIM * 4


class LazyStream:
    """Keeps what is issued until an event behind it, or itself, is waited for."""

    def __init__(self) -> None:
        self.issued: list[Callable[[], object]] = []
        self.done = 0
        self.waited_for: list[object] = []

    def issue(self, work: Callable[[], object]) -> None:
        self.issued.append(work)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.issued[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.issued))

    def wait_event(self, event: object) -> None:
        self.waited_for.append(event)


class LazyEvent:
    def __init__(self) -> None:
        self.behind: tuple[LazyStream, int] | None = None

    def record(self, stream: LazyStream) -> None:
        self.behind = stream, len(stream.issued)

    def synchronize(self) -> None:
        if self.behind is not None:
            self.behind[0].run(self.behind[1])


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LazyStream:
    """Copies and kernels are issued to it, as far as staging uses them."""
    lazy = LazyStream()

    @contextmanager
    def issuing(stream: LazyStream) -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(
                Tensor,
                "copy_",
                lambda to, source, non_blocking: lazy.issue(lambda: COPY(to, source)),
            )
            yield

    monkeypatch.setattr(torch.cuda, "Event", LazyEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: lazy)
    monkeypatch.setattr(torch.cuda, "stream", issuing)
    for name in ("gather_blocks", "scatter_blocks"):
        operator = getattr(gpu_staging, name)
        monkeypatch.setattr(
            gpu_staging,
            name,
            lambda *arguments, run=operator: lazy.issue(lambda: _with_real_copies(run, arguments)),
        )
    monkeypatch.setattr(gpu_staging, "STAGING_BYTES", 2 * BLOCK_BYTES)
    return lazy


def _with_real_copies(run: Callable[..., None], arguments: tuple) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "copy_", COPY)
        run(*arguments)


def memory(num_blocks: int, first: float) -> Tensor:
    shape = (LAYERS, 2, num_blocks, HEADS, BLOCK_SIZE, HEAD_DIM)
    return first + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def staging(caches: Tensor) -> gpu_staging.GpuStaging:
    return gpu_staging.GpuStaging(
        list(caches[:, 0]),
        list(caches[:, 1]),
        torch.Size(BLOCK_SHAPE),
        torch.float32,
        torch.device("cpu"),
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_out_and_in_through_two_chunks_in_turn(stream: LazyStream, count: int) -> None:
    """Nothing is overwritten before it was taken, however late the device comes to do its part."""
    caches, pool = memory(9, 0.0), memory(11, 10000.0)
    before, pool_before = caches.clone(), pool.clone()
    device_blocks, host_blocks = [8, 0, 3, 5, 1, 2, 7][:count], [10, 2, 0, 9, 4, 5, 1][:count]
    leaving, coming = staging(caches), staging(caches)

    leaving.out(device_blocks, block_arrays(pool), host_blocks, AT_ONCE)
    assert torch.equal(pool[:, :, host_blocks], before[:, :, device_blocks])
    others = [block for block in range(11) if block not in host_blocks]
    assert torch.equal(pool[:, :, others], pool_before[:, :, others])

    returning = device_blocks[::-1]
    coming.into(returning, block_arrays(pool), host_blocks, None)
    assert torch.equal(caches[:, :, returning], before[:, :, device_blocks])
    others = [block for block in range(9) if block not in device_blocks]
    assert torch.equal(caches[:, :, others], before[:, :, others])


def test_it_comes_behind_what_was_issued_elsewhere(stream: LazyStream) -> None:
    caches, after = memory(3, 0.0), LazyEvent()
    staging(caches).out([1], block_arrays(memory(3, 50.0)), [2], [(slice(None), after)])
    assert stream.waited_for == [after]


@pytest.mark.parametrize("count", [1, 6, 7])
def test_layers_go_out_as_they_are_computed(stream: LazyStream, count: int) -> None:
    """Each behind its own mark, through the room that all of them would have: six blocks of one
    layer at a time."""
    caches, pool = memory(9, 0.0), memory(11, 10000.0)
    computed, pool_before, marks = (
        caches.clone(),
        pool.clone(),
        [LazyEvent() for _ in range(LAYERS)],
    )
    caches.fill_(-1.0)
    device_blocks, host_blocks = [8, 0, 3, 5, 1, 2, 7][:count], [10, 2, 0, 9, 4, 5, 1][:count]

    def step() -> Iterator[tuple[slice, LazyEvent]]:
        for layer, mark in enumerate(marks):
            assert stream.waited_for == marks[:layer], (
                "what comes behind a layer's mark is that layer's"
            )
            stream.issue(lambda layer=layer: COPY(caches[layer], computed[layer]))
            yield slice(layer, layer + 1), mark

    staging(caches).out(device_blocks, block_arrays(pool), host_blocks, step())
    assert stream.waited_for == marks
    assert len(stream.issued) == LAYERS * (1 + 2 * (1 if count <= 6 else 2)), (
        "a gather and a copy for each chunk"
    )
    assert torch.equal(pool[:, :, host_blocks], computed[:, :, device_blocks])
    others = [block for block in range(11) if block not in host_blocks]
    assert torch.equal(pool[:, :, others], pool_before[:, :, others])


def test_the_next_chunk_is_issued_before_the_last_one_is_emptied(
    stream: LazyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or device and thread would wait for each other by turns."""
    issued: list[int] = []
    empty = gpu_staging.copy_blocks_between
    monkeypatch.setattr(
        gpu_staging,
        "copy_blocks_between",
        lambda *blocks: (issued.append(len(stream.issued)), empty(*blocks)),
    )
    staging(memory(6, 0.0)).out(range(6), block_arrays(memory(6, 99.0)), range(6), AT_ONCE)
    assert issued == [4, 6, 6], "a gather and a copy for each chunk of two blocks"
