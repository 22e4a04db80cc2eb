"""Graphs without a GPU: like CUDA's, they read and write the very tensors that they were recorded
with."""

from collections.abc import Callable

from torch import Tensor

from nanoserve.executor.step.decode_graphs import CudaRecorder


class FakeRecorder(CudaRecorder):
    """Replays by computing the step again, from what its tensors hold then.

    Attributes:
        replayed: rows of the graphs that ran, in order.
        recorded: rows of the graphs, in the order of recording.
    """

    def __init__(self) -> None:
        self.replayed: list[int] = []
        self.recorded: list[int] = []

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        hidden = step()
        self.recorded.append(len(hidden))

        def replay() -> None:
            hidden.copy_(step())
            self.replayed.append(len(hidden))

        return replay, hidden
