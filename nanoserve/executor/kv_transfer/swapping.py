"""Swaps KV blocks between a device's cache and the host pool, beside the computing.

Each direction has a thread, so that blocks come in while others still go out. On the CPU a block is
copied straight from cache to pool or back. On a GPU it passes through staging, see `gpu_staging`.
Blocks that a step fills and that leave the device at once go out layer by layer, while later layers
are computed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.executor.kv_transfer.gpu_staging import (
    BlockArrays,
    GpuStaging,
    Ready,
    block_arrays,
    copy_blocks_between,
)
from nanoserve.executor.kv_transfer.host_pool import HostPart
from nanoserve.scheduler.optional import Swap


class LayerMarks:
    """One thread computes a step and says which layers are `computed`; another waits for them, one
    by one."""

    def __init__(self, issued: Callable[[], "torch.cuda.Event | None"]) -> None:
        self._issued = issued
        self._changed = threading.Condition()
        self._marks: dict[int, torch.cuda.Event | None] = {}
        self._given_up = False

    def computed(self, layer: int) -> None:
        mark = self._issued()
        with self._changed:
            self._marks[layer] = mark
            self._changed.notify_all()

    def give_up(self) -> None:
        """Fail what waits for layers: no more of them will be computed."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, layer: int) -> "torch.cuda.Event | None":
        """Wait until that layer is computed. Returns the event that a GPU must have passed before
        its blocks are read; raises RuntimeError if the step was given up."""
        with self._changed:
            self._changed.wait_for(lambda: layer in self._marks or self._given_up)
            if layer not in self._marks:
                raise RuntimeError(f"the step was given up before layer {layer} was computed")
            return self._marks[layer]


class BlockMover:
    """Moves blocks between one layout's KV caches on a device and a worker's part of the host pool.

    `out` and `into` may run at the same time, each in one thread. The caches are one tensor per
    layer, [num_device_blocks, kv heads, block_size, head_dim]. Raises ValueError if they do not fit
    the part.
    """

    def __init__(
        self,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        part: HostPart,
        device: torch.device,
        last_layers: Sequence[int] | None = None,
    ) -> None:
        """`last_layers`: of each tensor, the last layer that writes to it, if layers of several
        groups do."""
        layers, _, _, *block = part.blocks.shape
        if len(key_caches) != layers or any(
            list(keys.shape[1:]) != block for keys in (*key_caches, *value_caches)
        ):
            raise ValueError(
                f"a part of {layers} layers and blocks of {block} does not fit the caches"
            )
        self._writes = part.writes
        self._last_layers = last_layers or range(layers)
        self._block_bytes = part.blocks[:, :, 0].nbytes
        self._device = device
        self._pool = block_arrays(part.blocks)
        self._caches: BlockArrays = []
        if device.type == "cuda":
            shape, dtype = torch.Size((layers, 2, *block)), part.blocks.dtype
            self._leaving = GpuStaging(key_caches, value_caches, shape, dtype, device)
            self._coming = GpuStaging(key_caches, value_caches, shape, dtype, device)
        else:
            self._caches = block_arrays(zip(key_caches, value_caches, strict=True))

    def issued(self) -> "torch.cuda.Event | None":
        """An event behind all work issued so far; None on the CPU, whose work is done when it is
        issued."""
        if self._device.type != "cuda":
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def out(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        after: "torch.cuda.Event | None" = None,
        marks: LayerMarks | None = None,
    ) -> int:
        """Copy device blocks into host blocks, pairwise, and return the bytes moved: none where
        another rank writes the same heads. The device must have passed `after` before it reads.
        With the marks of a step that fills the blocks, each layer is copied as soon as it is
        computed; raises RuntimeError if the step is given up before."""
        if not self._writes:
            return 0
        ready: Ready = [(slice(None), after)]
        if marks is not None:
            ready = (
                (slice(place, place + 1), marks.wait(layer))
                for place, layer in enumerate(self._last_layers)
            )
        if self._device.type == "cuda":
            self._leaving.out(device_blocks, self._pool, host_blocks, ready)
        else:
            for layers, _ in ready:
                copy_blocks_between(
                    self._caches[layers], device_blocks, self._pool[layers], host_blocks
                )
        return len(device_blocks) * self._block_bytes

    def into(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        after: "torch.cuda.Event | None" = None,
    ) -> int:
        """Copy host blocks into device blocks, which every rank does; as `out`."""
        if self._device.type == "cuda":
            self._coming.into(device_blocks, self._pool, host_blocks, after)
        else:
            copy_blocks_between(self._pool, host_blocks, self._caches, device_blocks)
        return len(device_blocks) * self._block_bytes


class _Job(NamedTuple):
    """Swaps of one direction that are carried out together, as `BlockMover.out` and `into` take
    them."""

    swaps: Sequence[Swap]
    mover: BlockMover
    after: "torch.cuda.Event | None"
    marks: LayerMarks | None = None


class Swapper:
    """Two threads, one for each direction, that carry out swaps in the order in which they begin.

    They call `done` with each swap that is done, the bytes moved, and when it began and ended
    (monotonic seconds), and `failed` with the error of each swap that failed; the others go on.
    """

    def __init__(
        self,
        done: Callable[[Swap, int, float, float], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._done, self._failed = done, failed
        self._jobs: dict[str, SimpleQueue[_Job | None]] = {
            "out": SimpleQueue(),
            "in": SimpleQueue(),
        }
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=f"swap-{direction}", daemon=True)
            for direction, jobs in self._jobs.items()
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, swaps: Sequence[Swap], mover: BlockMover) -> LayerMarks | None:
        """Have a plan's swaps carried out, behind all work issued before; returns at once. Call it
        in the thread that runs the plans, in their order.

        If swaps follow the rows of the plan's step, returns marks to set as its layers are
        computed, or to give up with the step: these swaps, and later ones that go out, wait for
        them.
        """
        after = mover.issued()
        behind_rows = [swap for swap in swaps if swap.after_row]
        for swap in swaps:
            if not swap.after_row:
                self._jobs[swap.direction].put(_Job((swap,), mover, after))
        if not behind_rows:
            return None
        marks = LayerMarks(mover.issued)
        self._jobs["out"].put(_Job(behind_rows, mover, after, marks))
        return marks

    def close(self) -> None:
        """Carry out what has begun, then end."""
        for jobs in self._jobs.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, jobs: "SimpleQueue[_Job | None]") -> None:
        while (job := jobs.get()) is not None:
            began = time.monotonic()
            device_blocks = [block for swap in job.swaps for block in swap.device_blocks]
            host_blocks = [block for swap in job.swaps for block in swap.host_blocks]
            try:
                if job.swaps[0].direction == "out":
                    num_bytes = job.mover.out(device_blocks, host_blocks, job.after, job.marks)
                else:
                    num_bytes = job.mover.into(device_blocks, host_blocks, job.after)
            except BaseException as error:
                for _ in job.swaps:
                    self._failed(error)
            else:
                ended = time.monotonic()
                for swap in job.swaps:
                    part = num_bytes * len(swap.device_blocks) // max(1, len(device_blocks))
                    self._done(swap, part, began, ended)


class LocalSwaps(Swapper):
    """A Swapper that keeps which swaps are done, for the one thread that begins and takes them."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[int | BaseException] = SimpleQueue()
        self._under_way = 0
        self._marks: LayerMarks | None = None  # the newest step's, if its layers are waited for
        super().__init__(lambda swap, *_: self._ended.put(swap.swap), self._ended.put)

    def begin(self, swaps: Sequence[Swap], mover: BlockMover) -> LayerMarks | None:
        self._under_way += len(swaps)
        marks = super().begin(swaps, mover)
        if marks is not None:
            self._marks = marks
        return marks

    def take_done(self, until: float | None) -> tuple[int, ...]:
        """Ids of swaps that are done since the last call. Waits for the first at most to that
        monotonic time, or as long as it takes; with none under way, not at all. Raises the error of
        one that failed."""
        done: list[int] = []
        while self._under_way:
            timeout: float | None = None
            if done:
                timeout = 0.0
            elif until is not None:
                timeout = max(0.0, until - time.monotonic())
            try:
                ended = self._ended.get(timeout=timeout)
            except Empty:
                break
            self._under_way -= 1
            if isinstance(ended, BaseException):
                raise ended
            done.append(ended)
        return tuple(done)

    def abandon(self) -> None:
        """Wait for the swaps under way and drop their ids, because their blocks may be used again.
        Give up a step whose layers are waited for."""
        self._give_up_step()
        while self._under_way:
            self._ended.get()
            self._under_way -= 1

    def close(self) -> None:
        self._give_up_step()
        super().close()

    def _give_up_step(self) -> None:
        if self._marks is not None:
            self._marks.give_up()
