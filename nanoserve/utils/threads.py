"""The processor of this machine, and the number of torch's threads and their way of waiting.

Threads are decided before torch is imported, when OpenMP reads its variables.
"""

import math
import os
import platform
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

MOST_THREADS = 1024
"""Largest number that a user may ask for, more than machines have cores. OpenMP may ignore larger
numbers."""
SPIN_COUNT = 1000
"""Polls of a waiting thread before it sleeps. With libgomp's default, beside a busy process, every
parallel operation takes a time slice of the operating system, several times its own time (measured:
9x)."""

_PROCESSORS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def prepare_threads(
    threads: int | None = None, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Set OpenMP's variables for this process and its children, and torch's variable for large
    tensors on huge pages, which are read a fifth to a third faster. A variable that the user has
    set stays.

    `threads` overrides OMP_NUM_THREADS; None means one per physical core that this process may use.
    A torch that is already imported is not affected.
    """
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(physical_cores()))
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
    environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def load_library_of_torch() -> None:
    """Load torch's largest library, so that importing torch finds it loaded: an import holds
    Python's lock meanwhile, for a third of a second, in which no other thread shows or reads
    anything. Call it after `prepare_threads`. Where the library has another name, the import loads
    it."""
    import ctypes  # a chat's prompt does not wait for it

    found = find_spec("torch")
    if "torch" in sys.modules or found is None or found.origin is None:
        return
    library = Path(found.origin).with_name("lib") / "libtorch_cpu.so"
    # a function that is called through ctypes does not hold the lock; CDLL itself does
    open_library = ctypes.CDLL(None).dlopen
    open_library.argtypes, open_library.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    open_library(os.fsencode(library), os.RTLD_NOW)


def threads_of_each(workers: int, environment: Mapping[str, str] = os.environ) -> int:
    """OMP_NUM_THREADS for each of several processes that share the threads of one; at least 1.

    Call it after `prepare_threads`. OpenMP allows a list, for nested regions; its first number
    counts.
    """
    first = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isascii() and first.isdigit():
        together = int(first)
    else:
        together = physical_cores()
    return max(1, together // workers)


def physical_cores(processors: Path = _PROCESSORS, quota: Path = _QUOTA) -> int:
    """Cores that this process may use, within a container's limit; two hardware threads of a core
    count once."""
    try:
        granted, period = map(int, quota.read_text().split())
        limit = math.ceil(granted / period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        limit = os.cpu_count() or 1
    return max(1, min(len(cores_in_use(processors)), limit))


def cores_in_use(processors: Path = _PROCESSORS) -> list[tuple[int, ...]]:
    """The processors that this process may use, grouped by core, in the order of their numbers."""
    allowed = set(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
    cores: dict[str, list[int]] = {}
    for number in sorted(allowed):
        siblings = str(number)
        with suppress(OSError):
            siblings = (
                (processors / f"cpu{number}" / "topology" / "thread_siblings_list")
                .read_text()
                .strip()
            )
        cores.setdefault(siblings, []).append(number)
    return [tuple(core) for core in cores.values()]


@cache
def processor_name_and_flags() -> tuple[str, frozenset[str]]:
    """The processor's name, and the instruction sets that it lists."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    lines = (line.partition(":") for line in reversed(text.splitlines()))
    # the first processor's come last, and stay
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = fields.get("flags") or fields.get("Features", "")
    return fields.get("model name", platform.machine()), frozenset(flags.split())
