"""measure_speeds: the speeds that each worker reaches while all work, measured within a second."""

import math
from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.executor.profiling.timers import Stopwatch
from nanoserve.models.decoder import SINGLE_RANK, TensorParallelGroup
from triton_ops import project
from triton_ops.cpu import cpu_operators

# repeats of each measurement. The best counts, because other programs disturb for a moment
_LOOKS = 3
_LOOK_SECONDS = 0.02
"""The least duration of a repeat: several time slices of the system's scheduler, where workers
share cores."""
# more than the caches near a core, or of a GPU, hold: weights come from memory in every step
_WEIGHT_BYTES = 2**26
_COPIED_BYTES = 2**25
_PIECES = 8
"""Pieces that weights and copies are divided into. They take turns, so that a repeat can end after
any of them."""
_DEPTH = 1024
_SMALL_BATCH = 8
"""Rows of the product that measures reading weights: a small batch. On a CPU torch reads weights
several times as fast for one row, and about as fast as here for up to thirty."""
_MANY_ROWS = 512
_MESSAGES = 16
_PASSES = 2
_FIRST_BYTES, _LAST_BYTES = 2**16, 2**26
_LONG_SECONDS = 0.01
"""Larger all-reduces than one of this duration are not tried."""


@torch.inference_mode()
def measure_speeds(
    device: torch.device,
    dtype: torch.dtype,
    group: TensorParallelGroup = SINGLE_RANK,
    workers: int = 1,
) -> MachineSpeeds:
    """Measure together with all workers of the group, which call this at the same time and get the
    same result. Workers that share a processor count as reaching equal shares of what all reach
    together.

    The call takes 128 MiB: 64 of weights in this dtype on the device, 64 for copies.
    """
    if device.type == "cpu":  # steps will run with them
        cpu_operators().load()
    together = _Together(device, group, workers)
    latency, bandwidth = _link(together) if workers > 1 else (0.0, math.inf)
    weight_bandwidth, flops, host_link = together.mean(
        *_products(together, dtype), _host_link(together)
    )
    return MachineSpeeds(
        memory_bandwidth=weight_bandwidth,
        flops=flops,
        host_link_bandwidth=host_link,
        link_bandwidth=bandwidth,
        link_latency=latency,
        overlaps=device.type != "cpu",
    )


class _Together:
    """Begins every measurement at the same time in all workers."""

    def __init__(self, device: torch.device, group: TensorParallelGroup, workers: int) -> None:
        self.device, self.workers, self._group = device, workers, group
        self._now = Stopwatch(device).now

    def seconds(self, action: Callable[[], object]) -> float:
        """Seconds of one action after a first, unmeasured one: the mean over a repeat, the best of
        a few repeats."""
        action()
        self._meet()
        best = math.inf
        for _ in range(_LOOKS):
            began, count = self._now(), 0
            while (passed := self._now() - began) < _LOOK_SECONDS or not count:
                action()
                count += 1
            best = min(best, passed / count)
        return best

    def all_reduce_seconds(self, tensor: Tensor, passes: int) -> float:
        """Seconds of one all-reduce out of `passes`, which end together. All workers get the same
        number."""
        self._group.all_reduce(tensor)
        self._meet()
        began = self._now()
        for _ in range(passes):
            self._group.all_reduce(tensor)
        (passed,) = self.mean(self._now() - began)
        return passed / passes

    def mean(self, *values: float) -> list[float]:
        """The mean of each value over all workers."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        return (self._group.all_reduce(found) / self.workers).tolist()

    def _meet(self) -> None:
        self._group.all_reduce(torch.zeros(1, device=self.device))


def _products(together: _Together, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes of weights per second with a small batch, operations per second with many rows."""
    weights = torch.ones(
        _WEIGHT_BYTES // (_DEPTH * dtype.itemsize), _DEPTH, dtype=dtype, device=together.device
    )
    few, many = (
        torch.ones(rows, _DEPTH, dtype=dtype, device=together.device)
        for rows in (_SMALL_BATCH, _MANY_ROWS)
    )
    pieces = cycle(weights.chunk(_PIECES))
    reading = together.seconds(lambda: project(few, next(pieces)))
    square = weights[:_DEPTH]
    computing = together.seconds(lambda: project(many, square))
    return weights.nbytes / _PIECES / reading, 2 * _MANY_ROWS * square.numel() / computing


def _host_link(together: _Together) -> float:
    """Bytes per second of copies between device and host memory, in the slower direction."""
    on_gpu = together.device.type == "cuda"
    host = torch.ones(_PIECES, _COPIED_BYTES // _PIECES, dtype=torch.uint8, pin_memory=on_gpu)
    device = torch.ones_like(host, device=together.device)
    pieces = cycle(zip(device, host, strict=True))

    def copy(*, out: bool) -> None:
        target, source = next(pieces)
        if out:
            target, source = source, target
        target.copy_(source, non_blocking=True)

    slowest = max(
        together.seconds(partial(copy, out=out)) for out in ((False, True) if on_gpu else (False,))
    )
    return host.nbytes / _PIECES / slowest


def _link(together: _Together) -> tuple[float, float]:
    """Seconds per message, and bus bandwidth: the two numbers of the cost model's all-reduce
    (Link)."""
    workers = together.workers
    small = together.all_reduce_seconds(torch.ones(1, device=together.device), _MESSAGES)
    size, seconds = _FIRST_BYTES, 0.0
    while seconds < _LONG_SECONDS and size <= _LAST_BYTES:
        numbers = torch.ones(size // 4, device=together.device)
        seconds = together.all_reduce_seconds(numbers, _PASSES)
        size *= 4
    moved = 2 * (workers - 1) / workers * numbers.nbytes
    return small / (2 * (workers - 1).bit_length()), moved / max(
        seconds - small, seconds / _MESSAGES
    )
