"""What this GPU can do at best, measured in the same run as everything that is held against it."""

from typing import Any

import torch

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.gpu.setting import Setting
from nanoserve.benchmarks.gpu.timing import make_clock, take_turns

COPY_BYTES = 2**31
PRODUCT_SIZE = 8192
_DRY_COPY_BYTES = 2**20
_DRY_PRODUCT_SIZE = 64


def measure_limits(setting: Setting) -> Limits:
    """The fastest copy within the device's memory (bytes read plus bytes written, per second), and the fastest product
    of two square matrices of random 16-bit numbers (two operations for each multiply-add, per second)."""
    copied = _DRY_COPY_BYTES if setting.dry_run else COPY_BYTES
    size = _DRY_PRODUCT_SIZE if setting.dry_run else PRODUCT_SIZE
    source = torch.ones(copied // 4, device=setting.device)
    target = torch.empty_like(source)
    factor = torch.randn(size, size, device=setting.device).to(setting.dtype)
    routes = {"copy": lambda: target.copy_(source), "product": lambda: factor @ factor}
    times = take_turns(routes, make_clock(setting), dry_run=setting.dry_run)
    return Limits(
        bytes_per_second=2 * copied / (times["copy"].low / 1e6),
        operations_per_second=2 * size**3 / (times["product"].low / 1e6),
    )


def limit_fields(limits: Limits) -> dict[str, Any]:
    """The limits in a report's units: 10^9 bytes and 10^12 operations per second."""
    return {
        "copy_gb_per_s": limits.bytes_per_second / 1e9,
        "matmul_tflops": limits.operations_per_second / 1e12,
    }
