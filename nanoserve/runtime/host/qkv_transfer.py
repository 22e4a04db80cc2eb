"""Queries, keys and values on their way from the device to the CPU that attends, and the result on its way back."""

import time
from typing import Protocol

import torch
from torch import Tensor


class QkvTransfer(Protocol):
    """One layer's attention of some rows. Made by the thread that runs the device, behind what it issued before."""

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query [n, num_heads, head_dim], key and value [n, num_kv_heads, head_dim] on the CPU; waits for the device
        to have them there. For the thread that attends."""

    @property
    def began(self) -> float:
        """After `take`: when the CPU's part of it began, in monotonic seconds. What it waited for the device to compute
        them is no part of it."""

    def make_room(self) -> Tensor:
        """[n, num_heads * head_dim] on the CPU, for the result."""

    def bring_back(self, result: Tensor) -> Tensor:
        """What `make_room` gave, filled now, on the device. For the thread that runs the device: its later work comes
        behind it."""


def hand_over(query: Tensor, key: Tensor, value: Tensor, device: torch.device) -> QkvTransfer:
    """Begin; returns at once. The tensors are left as they are until the result is asked for."""
    return FromGpu(query, key, value, device) if device.type == "cuda" else FromCpu(query, key, value)


class FromCpu:
    """The device is a CPU too: nothing is copied."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._given = query, key, value
        self.began = time.monotonic()

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._given

    def make_room(self) -> Tensor:
        return _room(self._given[0])

    def bring_back(self, result: Tensor) -> Tensor:
        return result


class FromGpu:
    """Through pinned memory: copied on the stream that computed them, with an event behind that the CPU waits for."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, device: torch.device) -> None:
        self._device = device
        stream = torch.cuda.current_stream(device)
        self._computed = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._copied = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._computed.record(stream)
        self._pinned = _to_pinned(query), _to_pinned(key), _to_pinned(value)
        self._copied.record(stream)
        self.began = time.monotonic()

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        self._copied.synchronize()
        self.began = time.monotonic() - self._computed.elapsed_time(self._copied) / 1000
        return self._pinned

    def make_room(self) -> Tensor:
        return _room(self._pinned[0], pin_memory=True)

    def bring_back(self, result: Tensor) -> Tensor:
        # torch keeps pinned memory from being used again until copies out of it are done.
        return result.to(self._device, non_blocking=True)


def _to_pinned(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _room(query: Tensor, *, pin_memory: bool = False) -> Tensor:
    rows, heads, head_dim = query.shape
    return torch.empty(rows, heads * head_dim, dtype=query.dtype, pin_memory=pin_memory)
