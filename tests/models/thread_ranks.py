"""The ranks of a tensor-parallel group as threads of this process."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_PATIENCE = 240.0  # seconds that a rank waits for the others: long, but no test hangs


class ThreadGroup:
    """A TensorParallelGroup of one thread per rank, which adds up in the order of ranks."""

    def __init__(self, rank: int, tensors: list[Tensor], barrier: threading.Barrier) -> None:
        self._rank, self._tensors, self._barrier = rank, tensors, barrier

    @classmethod
    def alone(cls) -> "ThreadGroup":
        """For a rank that waits for nobody, because it computes nothing."""
        return cls(0, [torch.empty(0)], threading.Barrier(1))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange(tensor)).sum(0)

    def gather(self, tensor: Tensor) -> Tensor | None:
        tensors = self._exchange(tensor)
        return torch.cat(tensors, dim=-1) if self._rank == 0 else None

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._tensors[self._rank] = tensor
        self._barrier.wait(_PATIENCE)
        tensors = list(self._tensors)
        self._barrier.wait(_PATIENCE)
        return tensors

    def leave(self) -> None:
        """A rank has failed: the others need not wait for it."""
        self._barrier.abort()


def on_every_rank(work: Callable[[int, ThreadGroup], Result], degree: int) -> Sequence[Result]:
    """Results of each rank's thread for its rank and group."""
    tensors, barrier = [torch.empty(0)] * degree, threading.Barrier(degree)

    def run(rank: int) -> Result:
        group = ThreadGroup(rank, tensors, barrier)
        try:
            with torch.inference_mode():
                return work(rank, group)
        except BaseException:
            group.leave()
            raise

    with ThreadPoolExecutor(degree) as threads:
        futures = [threads.submit(run, rank) for rank in range(degree)]
        failures = [failure for future in futures if (failure := future.exception())]
        told = [failure for failure in failures if not _of_another_rank(failure)]
        if failures:
            raise (told or failures)[0]
        return [future.result() for future in futures]


def _of_another_rank(failure: BaseException) -> bool:
    """Whether a rank failed only because it waited for one that had left."""
    errors = failure, failure.__cause__
    return any(isinstance(error, threading.BrokenBarrierError) for error in errors)
