"""Which cores are the device's and which the host's, where both compute on the CPU."""

import contextlib
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from nanoserve.errors import UsageError
from nanoserve.processes.threads import cores_in_use, physical_cores

_THREADS = Path("/proc/self/task")
_CORES_BESIDE_A_GPU = 2
"""That are left to who feeds the device, and to everything else."""


@dataclass(frozen=True, slots=True)
class CoreDivision:
    """Whose the processors of this machine are."""

    device: tuple[int, ...]
    host: tuple[int, ...]
    """Numbers of processors, whole cores each. They are the same where the host takes every core."""
    device_threads: int
    """How many threads the device has cores for."""


def default_host_threads(device_type: str) -> int:
    """How many threads attend on the CPU: half of the cores beside a device that is this CPU, which computes with the
    others; beside a GPU all but two. At least 1."""
    cores = physical_cores()
    return max(1, cores // 2 if device_type == "cpu" else cores - _CORES_BESIDE_A_GPU)


def divide_cores(host_threads: int) -> CoreDivision:
    """The last cores for so many host threads, one each, and the others for the device; if none is left, all for both.

    Only processors that this process may use are given out, and a container's limit counts.

    Raises:
        UsageError: if there are fewer cores than host threads.
    """
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
    """Keeps what this process computes as the device on the device's cores, with at most as many threads as these are.

    To be made by the thread that computes, before anything is compiled for its number of threads. All threads that
    exist are moved, for they may belong to its team already, and those that are made later stay with it; the host's
    thread chooses its own cores. As long as it lasts, `divide_cores` sees the device's cores only.
    """

    def __init__(self, division: CoreDivision) -> None:
        self._device = set(division.device)
        self._cores_before = _cores_of(0)
        self._threads_before = torch.get_num_threads()
        for thread in _threads():
            _move(thread, self._device)
        torch.set_num_threads(min(self._threads_before, division.device_threads))

    def close(self) -> None:
        """Let them run where this thread ran before."""
        for thread in _threads():
            if _cores_of(thread) == self._device:
                _move(thread, self._cores_before)
        torch.set_num_threads(self._threads_before)


def _threads() -> list[int]:
    """Of this process, as the system numbers them; none where it does not let them be moved."""
    return [int(entry.name) for entry in _THREADS.iterdir()] if _THREADS.is_dir() else []


def _cores_of(thread: int) -> set[int]:
    """Where a thread may run, 0 being this one; nowhere if it has ended meanwhile."""
    try:
        return os.sched_getaffinity(thread) if _THREADS.is_dir() else set()
    except ProcessLookupError:
        return set()


def _move(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
        os.sched_setaffinity(thread, cores)
