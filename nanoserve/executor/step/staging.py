"""The copies between host and device of one step, one each way: nobody waits for them before it
must."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: the widest load of one thread of a GPU. Compiled code copies unaligned tensors before it
reads them."""
_FIRST_BYTES = 64 * 1024
_MOST_OWNERS = 8
"""Owners of fixed arrays that are remembered: the batches of a model and of a drafter take
turns."""
_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int32", "int64", "float32", "float64")
}


class Staging:
    """Collects the arrays of one step, then moves all of them to the device in one copy, without
    waiting for it.

    `add` returns the tensor that will hold an array; work issued after `transfer` finds it filled.
    On the CPU nothing is moved: the tensor is a view of the array, which must not change until the
    step is done.
    """

    def __init__(self, device: torch.device) -> None:
        # Two take turns: the next step is prepared while the copy of the last one may still be on
        # its way.
        self._buffers = (
            None if device.type == "cpu" else cycle((HostBuffer(device), HostBuffer(device)))
        )
        self._filling: HostBuffer | None = None
        # By the id of their owner, which is kept so that no other object gets that id.
        self._fixed: dict[int, tuple[object, tuple[Tensor, ...]]] = {}
        self._next_fixed: dict[int, tuple[object, tuple[Tensor, ...]]] = {}

    def add(self, array: np.ndarray) -> Tensor:
        """The tensor on the device that the next transfer fills with an array, in the array's shape
        and dtype."""
        if self._buffers is None:
            return torch.from_numpy(array)
        if self._filling is None:
            self._filling = next(self._buffers)
            self._filling.begin()
        return self._filling.add(array)

    def add_fixed(self, owner: object, arrays: Sequence[np.ndarray]) -> tuple[Tensor, ...]:
        """Add arrays of an owner, which never change, as `add` does. They stay on the device, and
        are not moved again while few owners take turns."""
        known = self._fixed.get(id(owner))
        if known is None:
            known = owner, tuple([self.add(array) for array in arrays])
            self._next_fixed[id(owner)] = known
        return known[1]

    def transfer(self) -> None:
        """Begin to move what was added since the last transfer."""
        if self._filling is not None:
            self._filling.transfer()
            self._filling = None
        if self._next_fixed:
            if len(self._fixed) >= _MOST_OWNERS:
                self._fixed.clear()
            for place, (owner, tensors) in self._next_fixed.items():
                if self._buffers is not None:  # a view would keep all memory of this step
                    tensors = tuple([tensor.clone() for tensor in tensors])
                self._fixed[place] = owner, tensors
            self._next_fixed.clear()


class HostBuffer:
    """Host memory (pinned, for a GPU) and its target on the device. It grows to the size of the
    largest step so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._take_memory(_FIRST_BYTES)
        self._target = torch.empty(0, dtype=torch.uint8)
        self._targets: dict[torch.dtype, Tensor] = {}  # the target as numbers of each dtype
        self._end = 0
        self._copied: torch.cuda.Event | None = None
        if self._pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start on another step, with new memory on the device."""
        if self._copied is not None:
            # the step before the last: done long ago, unless the device lags
            self._copied.synchronize()
        self._renew()

    def add(self, array: np.ndarray) -> Tensor:
        """Pack an array behind those before it; returns where it will be on the device."""
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if start + array.nbytes > len(self._memory):
            # torch keeps pinned memory from being used again until copies out of it are done
            self._send()
            self._take_memory(2 * (start + array.nbytes))
            self._renew()
            start = 0
        self._end = start + array.nbytes
        np.ndarray(array.shape, array.dtype, self._memory, start)[...] = array
        dtype = _TORCH_DTYPES[array.dtype]
        target = self._targets.get(dtype)
        if target is None:
            target = self._targets[dtype] = self._target.view(dtype)
        # one call of torch for each array: each takes longer than packing a small one
        return target.as_strided(array.shape, _row_major(array.shape), start // array.itemsize)

    def transfer(self) -> None:
        self._send()
        if self._copied is not None:
            # not of the GPU that happens to be current
            self._copied.record(torch.cuda.current_stream(self._device))

    def _take_memory(self, size: int) -> None:
        self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self._memory = self._bytes.numpy()

    def _renew(self) -> None:
        self._target = torch.empty(len(self._bytes), dtype=torch.uint8, device=self._device)
        self._targets = {}
        self._end = 0

    def _send(self) -> None:
        self._target[: self._end].copy_(self._bytes[: self._end], non_blocking=True)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    if len(shape) == 1:
        return (1,)
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))


def to_pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the host, which is there behind the work of the current stream."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


class DeviceToHostCopy:
    """The results of one step on their way to the host: on a GPU through pinned memory, with an
    event behind the copies; on the CPU a tensor is its own copy, and there is nothing to wait
    for."""

    def __init__(self, device: torch.device) -> None:
        self.device_seconds: float | None = None
        """After `wait`: how long the step took on a GPU; None on the CPU, where the host's time is
        the device's."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Mark the beginning of the step's work."""
        if self._stream is not None:
            self._began.record(self._stream)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A tensor on the host that holds the same numbers, once `wait` has returned."""
        return tensor if self._stream is None else to_pinned(tensor)

    def end(self) -> None:
        """Mark the end of the step's work, after all its results are fetched."""
        if self._stream is not None:
            self._ended.record(self._stream)

    def wait(self) -> None:
        if self._stream is not None:
            self._ended.synchronize()
            self.device_seconds = float(self._began.elapsed_time(self._ended)) / 1000
