"""The part of this machine's CPU that attends for host sequences, and the cores that are left to the device."""

import contextlib
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from nanoserve.config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.processes.threads import cores_in_use, physical_cores
from nanoserve.runtime.host.host_attention import HostAttentionThread
from nanoserve.runtime.moves.host_pool import HostPart

_THREADS = Path("/proc/self/task")
_CORES_BESIDE_A_GPU = 2
"""Cores left to the thread that feeds the device, and to everything else."""


@dataclass(frozen=True, slots=True)
class CoreDivision:
    """The processors of the device and those of the host."""

    device: tuple[int, ...]
    host: tuple[int, ...]
    """Numbers of processors, whole cores each. They are the same where the host takes every core."""
    device_threads: int
    """How many threads the device has cores for."""


def default_host_threads(device_type: str) -> int:
    """Threads that attend on the CPU: half of the cores if the CPU is also the device, which computes with the other
    half; all but two beside a GPU. At least 1."""
    cores = physical_cores()
    return max(1, cores // 2 if device_type == "cpu" else cores - _CORES_BESIDE_A_GPU)


def divide_cores(host_threads: int) -> CoreDivision:
    """The last `host_threads` cores for the host, the others for the device; all for both if none is left. Counts only
    processors that this process may use; UsageError if there are fewer."""
    usable = physical_cores()
    if host_threads > usable:
        raise UsageError(
            f"--host-threads {host_threads}: only {usable} core{'s' * (usable > 1)} may be used here;"
            f" choose {usable} at most"
        )
    cores = cores_in_use()
    first = len(cores) - host_threads
    host = tuple(chain(*cores[first:]))
    return CoreDivision(
        device=tuple(chain(*cores[:first])) or host, host=host, device_threads=max(1, usable - host_threads)
    )


class DeviceCores:
    """Keeps the device's computing in this process on the device's cores, with at most one thread for each, until
    `close`.

    The computing thread makes it, before anything is compiled for a number of threads. All threads that exist are
    moved, because they may belong to its team; later ones inherit its cores, and the host's thread chooses its own.
    """

    def __init__(self, division: CoreDivision) -> None:
        self._device = set(division.device)
        self._cores_before = _cores_of(0)
        self._threads_before = torch.get_num_threads()
        for thread in _threads():
            _move(thread, self._device)
        torch.set_num_threads(min(self._threads_before, division.device_threads))

    def close(self) -> None:
        """Let the threads run where this thread ran before."""
        for thread in _threads():
            if _cores_of(thread) == self._device:
                _move(thread, self._cores_before)
        torch.set_num_threads(self._threads_before)


@dataclass(frozen=True, slots=True)
class HostProcessor:
    """Cores of the CPU, set apart from those that compute as the device if that is the CPU too."""

    threads: int
    """How many threads attend."""
    division: CoreDivision
    """Which cores are the host's and which the device's."""
    device: DeviceCores | None
    """Keeps a device that is this CPU to its own; None beside a GPU."""

    @classmethod
    def set_apart(cls, threads: int | None, device: torch.device) -> "HostProcessor":
        """Set that many cores apart, or None for the default; UsageError if there are fewer. Call it in the thread that
        computes."""
        threads = threads or default_host_threads(device.type)
        division = divide_cores(threads)
        return cls(threads, division, DeviceCores(division) if device.type == "cpu" else None)

    def start(self, config: ModelConfig, part: HostPart, device: torch.device) -> HostAttentionThread:
        """Have it attend over a part of the host pool for the device."""
        keys, values = part.blocks.unbind(1)
        cores = self.division.host
        return HostAttentionThread(config, keys.unbind(), values.unbind(), device, threads=self.threads, cores=cores)

    def close(self) -> None:
        """Let the device have all cores again."""
        if self.device is not None:
            self.device.close()


def _threads() -> list[int]:
    """The system's numbers of this process's threads; empty where the system does not let threads be moved."""
    return [int(entry.name) for entry in _THREADS.iterdir()] if _THREADS.is_dir() else []


def _cores_of(thread: int) -> set[int]:
    """Processors that a thread may use, 0 being this thread; empty if it has ended."""
    try:
        return os.sched_getaffinity(thread) if _THREADS.is_dir() else set()
    except ProcessLookupError:
        return set()


def _move(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        os.sched_setaffinity(thread, cores)
