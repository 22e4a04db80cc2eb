"""The way back from device to host: what a step computes is copied behind its work, and nobody waits before it must."""

import torch
from torch import Tensor


class DeviceToHostCopy:
    """The results of one step on their way to the host.

    On a GPU they are copied to pinned memory, and an event behind the copies tells when they are there. On the CPU a
    tensor is its own copy, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._began, self._ended = self._mark(), self._mark()

    def _mark(self) -> "torch.cuda.Event | None":
        if self._stream is None:
            return None
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """The step's work is issued from here on."""
        if self._began is not None:
            self._began.record(self._stream)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A tensor on the host that holds the same numbers, once `wait` has returned."""
        if self._stream is None:
            return tensor
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """All of the step's work has been issued, and all that is wanted of it was fetched."""
        if self._ended is not None:
            self._ended.record(self._stream)

    def wait(self) -> None:
        """Return when the device has come to the end."""
        if self._ended is not None:
            self._ended.synchronize()

    @property
    def device_seconds(self) -> float | None:
        """After `wait`: from the beginning to the end of the step on the device; None on the CPU, which does not know
        its work from the host's."""
        if self._began is None or self._ended is None:
            return None
        return float(self._began.elapsed_time(self._ended)) / 1000
