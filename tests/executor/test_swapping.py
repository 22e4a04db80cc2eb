"""Every byte: KV blocks go out under one parallel layout and come back under another, to other
places."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from nanoserve.config.model_parts import LayerDifferences
from nanoserve.executor.kv_transfer.gpu_staging import as_blocks
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.kv_transfer.swapping import BlockMover, LayerMarks, Swapper
from nanoserve.models.shards import Shard, make_shards, shard_config
from nanoserve.scheduler.optional import Swap
from tests.executor.small_model import small_config

CONFIG = replace(
    small_config(), num_layers=5, num_heads=8, num_kv_heads=2, head_dim=4, layers=LayerDifferences()
)
BLOCK_SIZE, DEVICE_BLOCKS, HOST_BLOCKS = 3, 9, 12
CPU = torch.device("cpu")
LAYOUTS = {
    "P1": (1, 1),
    "P2": (2, 1),
    "P4": (4, 1),
    "T2": (1, 2),
    "T4": (1, 4),
    "T8": (1, 8),
    "T2P2": (2, 2),
}
"""Stages and ranks; with four and eight ranks the two key-value heads are replicated."""


def coded(blocks: list[int]) -> Tensor:
    """[layers, 2, blocks, kv heads, block_size, head_dim]: a number of its own for every place, and
    every block."""
    sizes = (CONFIG.num_layers, 2, len(blocks), CONFIG.num_kv_heads, BLOCK_SIZE, CONFIG.head_dim)
    places = torch.arange(torch.Size(sizes).numel() // len(blocks)).view(*sizes[:2], 1, *sizes[3:])
    return places + 1000.0 * torch.tensor(blocks).view(1, 1, -1, 1, 1, 1)


class Workers:
    """The workers of a layout, all in this process: their caches and movers."""

    def __init__(self, layout: str, pool: HostPool, dtype: torch.dtype = torch.float32) -> None:
        stages, ranks = LAYOUTS[layout]
        self.shards = make_shards(CONFIG, pipeline_parallel=stages, tensor_parallel=ranks)
        self.caches = [self._caches(shard, dtype) for shard in self.shards]
        self.movers = [
            BlockMover(list(cache[:, 0]), list(cache[:, 1]), pool.part(shard), CPU)
            for shard, cache in zip(self.shards, self.caches, strict=True)
        ]

    @staticmethod
    def _caches(shard: Shard, dtype: torch.dtype) -> Tensor:
        own = shard_config(CONFIG, shard)
        shape = (own.num_layers, 2, DEVICE_BLOCKS, own.num_kv_heads, BLOCK_SIZE, own.head_dim)
        with torch.inference_mode():  # as the runner makes them
            return torch.full(shape, -1.0, dtype=dtype)

    @torch.inference_mode()
    def write(self, device_blocks: list[int], values: Tensor) -> None:
        """Write as steps would: each worker its own layers and heads."""
        for shard, cache in zip(self.shards, self.caches, strict=True):
            cache[:, :, device_blocks] = self._own(shard, values).to(cache.dtype)

    @torch.inference_mode()
    def check(self, device_blocks: list[int], values: Tensor) -> None:
        """These blocks hold the values, in every worker, and all others what they held at first."""
        others = [block for block in range(DEVICE_BLOCKS) if block not in device_blocks]
        for shard, cache in zip(self.shards, self.caches, strict=True):
            assert torch.equal(
                cache[:, :, device_blocks], self._own(shard, values).to(cache.dtype)
            ), shard
            assert (cache[:, :, others] == -1.0).all(), shard

    @staticmethod
    def _own(shard: Shard, values: Tensor) -> Tensor:
        heads = shard.kv_heads(CONFIG.num_kv_heads)
        return values[shard.layers.start : shard.layers.stop, :, :, heads.start : heads.stop]


def new_pool(dtype: torch.dtype = torch.float32) -> HostPool:
    pool = HostPool.of_one_process(
        CONFIG, num_blocks=HOST_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype
    )
    pool.blocks.fill_(-2.0)
    return pool


@pytest.mark.parametrize(("before", "after"), list(product(LAYOUTS, LAYOUTS)))
def test_every_byte_survives_a_change_of_layout(before: str, after: str) -> None:
    pool = new_pool()
    values = coded([0, 1, 2, 3])
    old, new = Workers(before, pool), Workers(after, pool)
    old.write([7, 2, 3, 8], values)
    moved = sum(mover.out([7, 2, 3, 8], [1, 11, 0, 6]) for mover in old.movers)
    assert moved == values.nbytes, "every head once, however often it is replicated"
    assert torch.equal(pool.blocks[:, :, [1, 11, 0, 6]], values)
    assert (pool.blocks[:, :, [2, 3, 4, 5, 7, 8, 9, 10]] == -2.0).all()

    # Some of it comes back, to other places and in another order, then the rest.
    for mover in new.movers:
        mover.into([4, 0], [0, 1])
    new.check([4, 0], values[:, :, [2, 0]])
    for mover in new.movers:
        mover.into([8, 1], [11, 6])
    new.check([4, 0, 8, 1], values[:, :, [2, 0, 1, 3]])
    old.check([7, 2, 3, 8], values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_byte_of_two(dtype: torch.dtype) -> None:
    pool = new_pool(dtype)
    values = coded([0, 1])
    old, new = Workers("T2P2", pool, dtype), Workers("T8", pool, dtype)
    old.write([5, 1], values)
    for mover in old.movers:
        mover.out([5, 1], [3, 9])
    for mover in new.movers:
        mover.into([0, 6], [9, 3])
    new.check([6, 0], values)


def test_many_blocks_are_moved_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nanoserve.executor.kv_transfer.gpu_staging.CHUNK_BYTES", 2 * 2 * BLOCK_SIZE * 4 * 4
    )
    pool = new_pool()
    workers, blocks = Workers("P1", pool), [8, 1, 4, 2, 6]
    workers.write(blocks, coded(blocks))
    assert workers.movers[0].out(blocks, [9, 2, 0, 7, 11]) == coded(blocks).nbytes
    assert torch.equal(pool.blocks[:, :, [9, 2, 0, 7, 11]], coded(blocks))


def test_a_part_that_is_not_the_caches_is_refused() -> None:
    pool = new_pool()
    stage = make_shards(CONFIG, pipeline_parallel=2, tensor_parallel=1)[1]
    cache = Workers("P1", pool).caches[0]
    with pytest.raises(ValueError, match="does not fit the caches"):
        BlockMover(list(cache[:, 0]), list(cache[:, 1]), pool.part(stage), CPU)


def test_blocks_are_seen_and_not_copied() -> None:
    cache = torch.zeros(3, 2, BLOCK_SIZE, 4, dtype=torch.bfloat16)
    blocks = as_blocks(cache[:, 1:])
    assert blocks.shape == (3, 1) and blocks.itemsize == BLOCK_SIZE * 4 * 2
    blocks[2] = blocks[2].tobytes().replace(b"\0", b"\x3f")
    assert (cache[2, 1] != 0).all() and (cache[2, 0] == 0).all() and (cache[:2] == 0).all()


# -----------------------------------------------------------------------------------------------
# layer by layer


class StepWithin:
    """Marks of a step that computes a layer only when somebody comes to wait for it, so that a
    layer copied too early goes out with what it held before."""

    def __init__(self, workers: Workers, number: int, blocks: list[int], values: Tensor) -> None:
        self._shard, self._cache = workers.shards[number], workers.caches[number]
        self._blocks, self._values = blocks, workers._own(workers.shards[number], values)
        self.waited_for: list[int] = []

    def wait(self, layer: int) -> None:
        with torch.inference_mode():
            self._cache[layer, :, self._blocks] = self._values[layer]
        self.waited_for.append(layer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_goes_out_when_it_is_computed(layout: str) -> None:
    pool, blocks, targets = new_pool(), [7, 2, 3], [1, 11, 0]
    workers, values = Workers(layout, pool), coded([0, 1, 2])
    moved = 0
    for number, (mover, shard) in enumerate(zip(workers.movers, workers.shards, strict=True)):
        step = StepWithin(workers, number, blocks, values)
        moved += mover.out(blocks, targets, marks=step)  # type: ignore[arg-type]
        assert step.waited_for == (
            list(range(len(shard.layers))) if pool.part(shard).writes else []
        )
    assert moved == values.nbytes
    assert torch.equal(pool.blocks[:, :, targets], values)
    assert (pool.blocks[:, :, [2, 3, 4, 5, 6, 7, 8, 9, 10]] == -2.0).all()


def test_marks_are_waited_for_one_by_one() -> None:
    issued = iter("abc")
    marks, passed = LayerMarks(lambda: next(issued)), SimpleQueue[object]()  # type: ignore[arg-type,return-value]
    thread = threading.Thread(target=lambda: [passed.put(marks.wait(layer)) for layer in (0, 1)])
    thread.start()
    marks.computed(0)
    assert passed.get(timeout=240) == "a"
    assert passed.empty()
    marks.computed(1)
    assert passed.get(timeout=240) == "b"
    thread.join()


def test_nobody_waits_for_a_step_that_is_given_up() -> None:
    marks = LayerMarks(lambda: None)
    marks.computed(0)
    marks.give_up()
    assert marks.wait(0) is None, "what was computed before is there"
    with pytest.raises(RuntimeError, match="given up before layer 1"):
        marks.wait(1)


# --------------------------------------------------------------------------------------------------
# threads


class Told:
    """Reports of a Swapper."""

    def __init__(self) -> None:
        self.done: dict[int, tuple[int, float, float]] = {}
        self.errors: list[BaseException] = []
        self.swapper = Swapper(self._done, self.errors.append)

    def _done(self, swap: Swap, num_bytes: int, began: float, ended: float) -> None:
        self.done[swap.swap] = num_bytes, began, ended


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.001)


def test_swaps_in_both_directions_at_once() -> None:
    pool, told = new_pool(), Told()
    workers, values = Workers("P1", pool), coded(list(range(6)))
    workers.write([0, 1, 2], values[:, :, :3])
    pool.blocks[:, :, [4, 5, 6]] = values[:, :, 3:]
    began = time.monotonic()
    told.swapper.begin([Swap(8, 0, "out", (0, 1), (9, 3))], workers.movers[0])
    told.swapper.begin([Swap(9, 1, "in", (5, 8, 6), (4, 5, 6))], workers.movers[0])
    told.swapper.begin([Swap(10, 2, "out", (2,), (7,))], workers.movers[0])
    told.swapper.close()
    assert torch.equal(pool.blocks[:, :, [9, 3, 7]], values[:, :, :3])
    workers.check([0, 1, 2, 5, 8, 6], values)
    assert {swap: told.done[swap][0] for swap in told.done} == {
        8: values[:, :, :2].nbytes,
        9: values[:, :, 3:].nbytes,
        10: values[:, :, :1].nbytes,
    }
    assert all(began <= start <= end <= time.monotonic() for _, start, end in told.done.values())
    assert told.done[8][2] <= told.done[10][1], "one after the other in each direction"
    assert not told.errors


def test_a_swap_in_does_not_wait_for_one_that_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told, gate = Told(), threading.Event()
    mover = Workers("P1", new_pool()).movers[0]
    monkeypatch.setattr(mover, "out", lambda *arguments: int(gate.wait(240)))
    told.swapper.begin([Swap(0, 0, "out", (0,), (0,))], mover)
    told.swapper.begin([Swap(1, 1, "in", (1,), (1,))], mover)
    wait_until(lambda: 1 in told.done)
    assert 0 not in told.done
    gate.set()
    told.swapper.close()
    assert told.done[0][0] == 1


def test_a_layer_goes_out_while_the_next_one_is_computed() -> None:
    """And a swap that follows no row goes out before, however late it stands in the plan."""
    pool, told = new_pool(), Told()
    workers, values = Workers("P1", pool), coded([0, 1, 2, 3])
    workers.write([8], values[:, :, 3:])
    swaps = [
        Swap(0, 0, "out", (7, 2), (1, 11), after_row=True),
        Swap(1, 1, "out", (8,), (4,)),
        Swap(2, 2, "out", (3,), (0,), after_row=True),
    ]
    marks = told.swapper.begin(swaps, workers.movers[0])
    assert marks is not None
    (cache,) = workers.caches
    for layer in range(CONFIG.num_layers):
        with torch.inference_mode():
            cache[layer, :, [7, 2, 3]] = values[layer, :, :3]
        marks.computed(layer)
        wait_until(
            lambda layer=layer: torch.equal(pool.blocks[layer, :, [1, 11, 0]], values[layer, :, :3])
        )
        assert (pool.blocks[layer + 1 :, :, [1, 11, 0]] == -2.0).all(), (
            "these are still being computed"
        )
        assert set(told.done) <= ({1} if layer < CONFIG.num_layers - 1 else {0, 1, 2})
    told.swapper.close()
    assert torch.equal(pool.blocks[:, :, [1, 11, 0, 4]], values)
    assert list(told.done) == [1, 0, 2] and not told.errors
    assert [told.done[swap][0] for swap in range(3)] == [values[:, :, :n].nbytes for n in (2, 1, 1)]


def test_swaps_that_follow_no_row_want_no_marks() -> None:
    told, mover = Told(), Workers("P1", new_pool()).movers[0]
    assert (
        told.swapper.begin([Swap(0, 0, "out", (1,), (1,)), Swap(1, 1, "in", (2,), (2,))], mover)
        is None
    )
    told.swapper.close()
    assert set(told.done) == {0, 1}


def test_swaps_behind_a_step_that_is_given_up_fail_and_later_ones_go_on() -> None:
    told, mover = Told(), Workers("P1", new_pool()).movers[0]
    swaps = [Swap(one, one, "out", (one,), (one,), after_row=True) for one in (0, 1)]
    marks = told.swapper.begin(swaps, mover)
    assert marks is not None
    marks.computed(0)
    told.swapper.begin([Swap(2, 2, "out", (2,), (2,))], mover)
    marks.give_up()
    told.swapper.close()
    assert ["given up before layer 1" in str(error) for error in told.errors] == [True, True], (
        "each is told of"
    )
    assert list(told.done) == [2]


def test_what_a_swap_fails_with_is_told() -> None:
    told = Told()
    mover = Workers("P1", new_pool()).movers[0]
    told.swapper.begin([Swap(0, 0, "out", (DEVICE_BLOCKS,), (0,))], mover)
    told.swapper.begin([Swap(1, 1, "in", (1,), (1,))], mover)
    told.swapper.close()
    (error,) = told.errors
    assert isinstance(error, IndexError)
    assert list(told.done) == [1], "the other direction goes on"
