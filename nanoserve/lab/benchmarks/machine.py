"""Where and with what a benchmark ran, and how much of the processor others used meanwhile. No
torch."""

import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoserve import __version__
from nanoserve.utils.installation import commit
from nanoserve.utils.threads import processor_name_and_flags

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "llama-cpp-python",
    "numpy",
    "safetensors",
    "tokenizers",
)
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "OMP_WAIT_POLICY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
)
_PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle and iowait of /proc/stat's cpu line
_LAST_BUSY_FIELD = 8  # behind it come guest times, which are counted in user time already
_SECRET_FLAG = "--api-key"
_WANTED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def describe_run() -> dict[str, Any]:
    """Machine, versions, commit and command line, for the head of a report."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": {"nanoserve": __version__, "python": platform.python_version()}
        | installed_versions(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def command_line() -> str:
    """The typed command, with the program reduced to its name, and without secrets: reports are
    passed on."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if flag == _SECRET_FLAG and equals:
            words[place] = f"{flag}=..."
        elif flag == _SECRET_FLAG and place + 1 < len(words):
            words[place + 1] = "..."
    return " ".join(words)


@cache
def describe_machine() -> dict[str, Any]:
    model, flags = processor_name_and_flags()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "instruction_sets": [flag for flag in _WANTED_FLAGS if flag in flags],
        "cores": available_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def machine_text(machine: Mapping[str, Any]) -> str:
    """A description of a machine in words, for the head of a table."""
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}"
    )


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter to a benchmark, without importing them."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def cache_directory() -> Path:
    """Where what was measured or written once is kept: nanoserve/bench in the user's cache
    directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nanoserve" / "bench"


class ForeignLoad:
    """Measures, from its creation or last reading on, how many cores other processes kept busy. Own
    work is that of this process, of those with the ids in ``own``, and of all their descendants."""

    def __init__(self, own: Sequence[int] = (), proc: Path = _PROC) -> None:
        self._own = own
        self._proc = proc
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._before = self._read()

    def read(self) -> float | None:
        """Cores kept busy by others since the last reading, 0.0 and up; None where the kernel does
        not tell."""
        before, self._before = self._before, self._read()
        if before is None or self._before is None:
            return None
        seconds, busy, own = (now - then for now, then in zip(self._before, before, strict=True))
        if seconds <= 0:
            return None
        return max(0.0, (busy - own) / self._ticks / seconds)

    def _read(self) -> tuple[float, int, int] | None:
        """(time, busy ticks of all processes, busy ticks of ours)"""
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
            counted = [int(field) for field in fields[:_LAST_BUSY_FIELD]]
            busy = sum(ticks for index, ticks in enumerate(counted) if index not in _IDLE_FIELDS)
            own = self._process_ticks(os.getpid())
        except (OSError, ValueError, IndexError):
            return None
        for process in self._processes():
            # it has ended: its ticks now count with the process that waited for it
            with suppress(OSError):
                own += self._process_ticks(process)
        return time.monotonic(), busy, own

    def _processes(self) -> set[int]:
        """All whose work is ours, but this one."""
        pending = [os.getpid()] + list(self._own)
        found = set(pending)
        while pending:
            for file in (self._proc / str(pending.pop()) / "task").glob("*/children"):
                with suppress(OSError):  # a thread that has just ended
                    children = set(map(int, file.read_text().split())) - found
                    found |= children
                    pending += children
        return found - {os.getpid()}

    def _process_ticks(self, process: int) -> int:
        # The name, in brackets, may hold blanks: the fields count from behind it.
        fields = (self._proc / str(process) / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))  # its own time, and that of children it has waited for
