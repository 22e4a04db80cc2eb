"""Which cores of its machine a worker keeps to, where the CPU attends beside each worker's device."""

import os
from collections.abc import Sequence

from nanoserve.processes.threads import cores_in_use


def keep_to_own_cores(number: int, workers: int) -> None:
    """Have this process run on its part of the cores, before it starts any thread that computes.

    Else threads that attend for one stage would be given the cores on which another one computes.

    Args:
        number: which of the workers of this machine it is.
        workers: how many there are.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {processor for core in part_of(cores_in_use(), number, workers) for processor in core})


def part_of(cores: Sequence[tuple[int, ...]], number: int, workers: int) -> Sequence[tuple[int, ...]]:
    """Cores in a row, as many for each as for the others but for one; with more workers than cores, some share one."""
    if workers > len(cores):
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // workers : (number + 1) * len(cores) // workers]
