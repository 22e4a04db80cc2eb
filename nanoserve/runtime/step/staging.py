"""One copy from host to device per step: all arrays that the device needs travel in one buffer."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: the widest load of one thread of a GPU. Compiled code copies what is aligned worse before it reads it."""


class Staged:
    """An array on its way to the device."""

    __slots__ = ("_tensor", "array")

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self._tensor: Tensor | None = None

    def arrive(self, tensor: Tensor) -> None:
        """Take note of where it is now."""
        self._tensor = tensor

    @property
    def tensor(self) -> Tensor:
        """The array on the device, in its own shape and dtype.

        Raises:
            RuntimeError: before the transfer, on the CPU as well: code that works there works everywhere.
        """
        if self._tensor is None:
            raise RuntimeError("a staged array was used before its transfer")
        return self._tensor


class Staging:
    """Collects the arrays of one step, then moves all of them at once; nobody waits for the device.

    An array must stay as it is until the transfer; on the CPU, where nothing is moved and the tensors are views of the
    arrays, until the step is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._staged: list[Staged] = []
        # Two in turn: the next step is prepared while the copy of the former may still be on its way.
        self._buffers = None if device.type == "cpu" else cycle((HostBuffer(device), HostBuffer(device)))

    def add(self, array: np.ndarray) -> Staged:
        """Have an array moved by the next transfer."""
        staged = Staged(array)
        self._staged.append(staged)
        return staged

    def transfer(self) -> None:
        """Begin to move what was added since the last transfer; work that is issued later on the stream finds it."""
        staged, self._staged = self._staged, []
        if self._buffers is None:
            tensors = [torch.from_numpy(one.array) for one in staged]
        elif staged:
            tensors = next(self._buffers).copy([one.array for one in staged])
        else:
            return
        for one, tensor in zip(staged, tensors, strict=True):
            one.arrive(tensor)


class HostBuffer:
    """Memory of the host that its device can read by itself (pinned, for a GPU), large enough for any step so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def copy(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Pack the arrays, copy all of them in one go, and say where each will be on the device."""
        starts, end = [], 0
        for array in arrays:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            starts.append(start)
            end = start + array.nbytes
        self._claim(end)
        packed = self._bytes.numpy()
        for array, start in zip(arrays, starts, strict=True):
            packed[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        moved = self._bytes[:end].to(self._device, non_blocking=True, copy=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))  # not of the GPU that happens to be current
        return [
            moved[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]

    def _claim(self, size: int) -> None:
        """Have room for so many bytes, in memory from which nothing is being copied any more."""
        if self._copied is not None:
            self._copied.synchronize()  # of the step before the last: done long ago, unless the device lags behind
        if size > self._bytes.numel():
            self._bytes = torch.empty(2 * size, dtype=torch.uint8, pin_memory=self._pinned)
        if self._pinned and self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
