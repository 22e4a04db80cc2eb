"""Where the measurements run, and whether they are meant."""

from dataclasses import dataclass
from typing import Any

import torch

from nanoserve.errors import UsageError
from nanoserve.runtime.devices import use_writable_triton_cache
from triton_ops.gpu.configurations import OLDEST_GENERATION

DRY_RUN_DEVICE = "no GPU (dry run on the CPU)"


@dataclass(frozen=True, slots=True)
class Setting:
    """A device, and the number format of what is timed on it.

    Attributes:
        dry_run: the CPU stands in for the GPU with tiny shapes: the logic is tested, and no figure means anything.
    """

    device: torch.device
    dry_run: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry_run else torch.bfloat16

    def synchronize(self) -> None:
        """Wait until the device has done everything; raises torch's error if it failed at that."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

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


def find_setting(*, dry_run: bool) -> Setting:
    """The GPU of this process, or with `dry_run` the CPU.

    Raises:
        UsageError: if there is no GPU that the kernels run on.
    """
    if dry_run:
        return Setting(torch.device("cpu"), dry_run=True)
    check_gpu()
    major, minor = torch.cuda.get_device_capability()
    if major < OLDEST_GENERATION:
        raise UsageError(
            f"{torch.cuda.get_device_name()} is too old for bench gpu: its compute capability is {major}.{minor}, the "
            f"kernels need {OLDEST_GENERATION}.0"
        )
    use_writable_triton_cache()
    return Setting(torch.device("cuda", torch.cuda.current_device()), dry_run=False)


def check_gpu() -> None:
    """Take nothing of the GPU's memory, but see that there is one.

    Raises:
        UsageError: if there is none.
    """
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
        raise UsageError(f"bench gpu needs an NVIDIA GPU, and torch finds none{build}; --dry-run tries it on the CPU")
