"""Limits of this machine: read bandwidth and matrix-product speed, measured with torch and
remembered."""

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.floors import Limits
from nanoserve.lab.benchmarks.machine import cache_directory, describe_machine
from nanoserve.models.dtypes import format_name
from nanoserve.models.hub import ProgressCallback
from nanoserve.utils.files import replace_file

READ_BYTES = 2**30  # far beyond any cache that this machine could have for itself
# of square matrices; the largest that is quick reaches the most
_PRODUCT_SIZES = (256, 512, 1024, 2048)
# seconds: Ctrl-C acts behind it. A slow number format is known by its small products
_LONGEST_PRODUCT = 0.5
_PARTS = 8  # pieces of the buffer, read one after another: Ctrl-C acts between them
_PASSES = 5
_LOOKS = 4
STAGE = "reading and multiplying, to know what the machine does at best"


class BandwidthProbe:
    """Reads one large buffer again and again; its memory is taken once, so that a reading disturbs
    little."""

    def __init__(self, num_bytes: int = READ_BYTES) -> None:
        self._buffer = torch.ones(num_bytes // 4)
        self._parts = self._buffer.chunk(_PARTS)

    def read(self) -> float:
        """Bytes per second now: the median of a few passes with all of torch's threads."""
        return self._buffer.nbytes / statistics.median(self._passes())

    def best(self) -> float:
        """Bytes per second at best: the fastest of a few passes."""
        return self._buffer.nbytes / min(self._passes())

    def _passes(self) -> list[float]:
        return [sum(timed(part.sum) for part in self._parts) for _ in range(_PASSES)]


def machine_limits(
    dtype: torch.dtype,
    probe: BandwidthProbe,
    path: Path | None = None,
    *,
    progress: ProgressCallback = lambda *_: None,
) -> Limits:
    """The best limits ever seen on this machine: measured each time, and kept if better than the
    stored ones.

    Looks of each kind take turns, so that a busy moment does not spoil all of one. 16-bit numbers
    may be multiplied as float32 where that is faster. ``path`` defaults to a file in the user's
    cache directory, which may be unusable.
    """
    path = path or cache_directory() / "limits.json"
    key = json.dumps([describe_machine(), torch.get_num_threads(), torch.__version__])
    formats = {format_name(one): one for one in (torch.float32, dtype)}
    known: dict[str, dict[str, float]] = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, float]])
    best = known.setdefault(key, {})
    for look in range(_LOOKS):
        progress(STAGE, look, _LOOKS)
        best["read"] = max(probe.best(), best.get("read", 0.0))
        for name, one in formats.items():
            best[name] = max(_product_speed(one), best.get(name, 0.0))
    progress(STAGE, _LOOKS, _LOOKS)
    # a cache that cannot be kept is measured again next time
    with contextlib.suppress(OSError, RuntimeFailure):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(known, indent=1))
    return Limits(best["read"], max(best[name] for name in formats))


def _product_speed(dtype: torch.dtype) -> float:
    """Operations per second of the best of some products, each larger than the one before and none
    of them long."""
    best = 0.0
    for size in _PRODUCT_SIZES:
        if best and 2 * size**3 / best > _LONGEST_PRODUCT:
            break
        factor = torch.ones(size, size, dtype=dtype)
        best = max(best, 2 * size**3 / timed(partial(torch.mm, factor, factor)))
    return best


def timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
