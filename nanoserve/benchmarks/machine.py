"""Where and with what a benchmark ran; no torch."""

import os
import platform
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nanoserve import __version__
from nanoserve.processes.installation import commit
from nanoserve.processes.threads import processor_name_and_flags

PACKAGES = ("torch", "triton", "transformers", "llama-cpp-python", "numpy", "safetensors", "tokenizers")
ENVIRONMENT = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "MKL_NUM_THREADS")
_SECRET_FLAG = "--api-key"
_WANTED_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def describe_run() -> dict[str, Any]:
    """Machine, versions, commit and command line, for the head of a report."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": {"nanoserve": __version__, "python": platform.python_version()} | installed_versions(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def command_line() -> str:
    """What was typed, with the program reduced to its name, and without secrets: reports are passed on."""
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
    """Processor, cores, memory and system."""
    model, flags = processor_name_and_flags()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model,
        "instruction_sets": [flag for flag in _WANTED_FLAGS if flag in flags],
        "cores": available_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def available_cores() -> int:
    """Logical processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed_versions() -> dict[str, str]:
    """Versions of the packages that matter to a benchmark, without importing them."""
    versions = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def cache_directory() -> Path:
    """Where what was measured or written once is kept: nanoserve/bench in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "nanoserve" / "bench"
