"""What this machine can do at best: read bandwidth and matrix-product speed, measured with torch and remembered."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.machine import cache_directory, describe_machine

READ_BYTES = 2**30
"""Far beyond any cache that this machine could have for itself."""
_PRODUCT_SIZE = 2048
_PASSES = 4


class BandwidthProbe:
    """Reads one large buffer again and again; its memory is taken once, so that a reading disturbs little."""

    def __init__(self, num_bytes: int = READ_BYTES) -> None:
        self._buffer = torch.ones(num_bytes // 4)

    def read(self) -> float:
        """Bytes per second: the median of a few passes with all of torch's threads."""
        seconds = sorted(_timed(lambda: self._buffer.sum()) for _ in range(_PASSES + 1))
        return self._buffer.nbytes / seconds[len(seconds) // 2]


def measure_peak(dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product in this number format: the best of a few."""
    size = _PRODUCT_SIZE
    left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / min(_timed(lambda: left @ right) for _ in range(_PASSES))


def machine_limits(dtype: torch.dtype, probe: BandwidthProbe, path: Path | None = None) -> Limits:
    """The best ever seen on this machine: measured anew each time, and kept if better than what was kept before.

    One busy moment thus spoils one measurement, not all later ones. ``path`` defaults to a file in the user's cache
    directory; if it cannot be read or written, only the fresh figures count.
    """
    path = path or cache_directory() / "limits.json"
    key = json.dumps([describe_machine(), torch.get_num_threads(), torch.__version__])
    known = _read(path)
    mine: dict[str, float] = known.setdefault(key, {})
    name = str(dtype).removeprefix("torch.")
    fresh = {"read": probe.read(), name: measure_peak(dtype)}
    for what, value in fresh.items():
        mine[what] = max(value, mine.get(what, 0.0))
    _write(path, known)
    return Limits(mine["read"], mine[name])


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_table = isinstance(found, dict) and all(
        isinstance(entry, dict) and all(isinstance(value, float) for value in entry.values())
        for entry in found.values()
    )
    return found if is_table else {}


def _write(path: Path, known: dict[str, dict[str, float]]) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be kept is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(known, indent=1), encoding="utf-8")
        draft.replace(path)
