"""The part of this machine's CPU that attends for host sequences, and the cores that are left to
the device."""

import contextlib
import os
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
from nanoserve.executor.kv_transfer.host_pool import HostPart
from nanoserve.utils.threads import cores_in_use, physical_cores

_THREADS = Path("/proc/self/task")
_CORES_BESIDE_A_GPU = 2
"""Cores left to the thread that feeds the device, and to everything else."""


def default_host_threads(device_type: str) -> int:
    """Threads that attend on the CPU: half of the cores if the CPU is also the device, which
    computes with the other half; all but two beside a GPU. At least 1."""
    cores = physical_cores()
    return max(1, cores // 2 if device_type == "cpu" else cores - _CORES_BESIDE_A_GPU)


@dataclass(slots=True)
class HostProcessor:
    """Cores of the CPU that attend, and those that are left to the device."""

    threads: int
    cores: tuple[int, ...]
    device_cores: tuple[int, ...]
    """Numbers of processors, whole cores each. They are the same where the host takes every
    core."""
    device_threads: int
    _before: tuple[set[int], int] | None = None
    """While the device is kept to its cores, the processors and the number of threads that it had
    before."""

    @classmethod
    def divide(cls, threads: int) -> Self:
        """The last `threads` cores for the host, the others for the device; all for both if none is
        left. Counts only processors that this process may use; UsageError if there are fewer."""
        usable = physical_cores()
        if threads > usable:
            cores_text = f"{usable} cores"
            if usable == 1:
                cores_text = "1 core"
            raise UsageError(
                f"--host-threads {threads}: only {cores_text} may be used here; choose {usable} at "
                "most"
            )
        cores = cores_in_use()
        first = len(cores) - threads
        host = tuple(chain.from_iterable(cores[first:]))
        device = tuple(chain.from_iterable(cores[:first]))
        if not device:
            device = host
        return cls(threads, host, device, device_threads=max(1, usable - threads))

    @classmethod
    def set_apart(cls, threads: int | None, device: torch.device) -> Self:
        """Set that many cores apart, or None for the default; UsageError if there are fewer. The
        computing thread calls it, before anything is compiled for a number of threads.

        A device that is the CPU is kept to its cores in this process, with at most one thread for
        each, until `close`. All threads that exist are moved, because they may belong to its team;
        later ones inherit its cores, and the host's thread chooses its own.
        """
        processor = cls.divide(threads or default_host_threads(device.type))
        if device.type == "cpu":
            processor._before = _cores_of(0), torch.get_num_threads()
            for thread in _threads():
                _move(thread, set(processor.device_cores))
            torch.set_num_threads(min(torch.get_num_threads(), processor.device_threads))
        return processor

    @property
    def confines_device(self) -> bool:
        return self._before is not None

    def start(
        self, config: ModelConfig, part: HostPart, device: torch.device
    ) -> HostAttentionThread:
        keys, values = part.blocks.unbind(1)
        return HostAttentionThread(
            config, keys.unbind(), values.unbind(), device, threads=self.threads, cores=self.cores
        )

    def close(self) -> None:
        """Let the device's threads run where they ran before."""
        if self._before is not None:
            cores, threads = self._before
            for thread in _threads():
                if _cores_of(thread) == set(self.device_cores):
                    _move(thread, cores)
            torch.set_num_threads(threads)
            self._before = None


def _threads() -> list[int]:
    """The system's numbers of this process's threads; empty where the system does not let threads
    be moved."""
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
