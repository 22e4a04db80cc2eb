"""Where the measurements run, and whether they are meant."""

import gc
from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.runtime.launch.model_loading import check_cuda, usable_gpu, use_writable_triton_cache

DRY_RUN_DEVICE = "no GPU (dry run on the CPU)"
_ASKED, _INSTEAD = "bench gpu", "try it on the CPU with --dry-run"


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """A device, and the number format of what is timed on it."""

    device: torch.device
    dry_run: bool
    """The CPU stands in for the GPU with tiny shapes: the logic is tested, and no figure means anything."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry_run else torch.bfloat16

    def synchronize(self) -> None:
        """Wait until the device has done everything; raises torch's error if it failed at that."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def give_back(self) -> bool:
        """Give memory that torch keeps for nothing back to the device; False if the device, or what is left of torch
        after an error, cannot even do that: only a new process can go on then."""
        try:
            self.synchronize()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except RuntimeError:  # a kernel's error stays until the process ends, as does an allocator's failed recording
            return False
        return True

    def facts(self) -> dict[str, Any]:
        """What the device is, for the head of a report."""
        if self.device.type != "cuda":
            return {"name": DRY_RUN_DEVICE}
        properties: Any = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "cuda": torch.version.cuda,
        }


def find_setting(*, dry_run: bool) -> GpuSetting:
    """The GPU of this process, or with `dry_run` the CPU.

    Raises:
        UsageError: if there is no GPU that the kernels run on.
    """
    if dry_run:
        return GpuSetting(torch.device("cpu"), dry_run=True)
    device = usable_gpu(None, asked=_ASKED, instead=_INSTEAD)
    use_writable_triton_cache()
    return GpuSetting(device, dry_run=False)


def check_gpu() -> None:
    """Check that there is a GPU, and leave its memory free for the measurements.

    Raises:
        UsageError: if there is none.
    """
    check_cuda(asked=_ASKED, instead=_INSTEAD)
