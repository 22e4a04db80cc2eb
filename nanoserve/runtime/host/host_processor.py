"""The part of this machine's CPU that attends for host sequences."""

from dataclasses import dataclass

import torch

from nanoserve.config import ModelConfig
from nanoserve.runtime.host.host_attention import HostAttention
from nanoserve.runtime.launch.core_division import CoreDivision, DeviceCores, default_host_threads, divide_cores
from nanoserve.runtime.moves.host_pool import HostPart


@dataclass(frozen=True, slots=True)
class HostProcessor:
    """Cores of the CPU, set apart from those that compute as the device if that is the CPU too."""

    threads: int
    """How many threads attend."""
    division: CoreDivision
    """Which cores are the host's and which the device's."""
    device: DeviceCores | None
    """Keeps a device that is this CPU to its own; None beside a GPU."""

    @classmethod
    def set_apart(cls, threads: int | None, device: torch.device) -> "HostProcessor":
        """Set that many cores apart; None for half of them, or all but two beside a GPU.

        Call it in the thread that computes.

        Raises:
            UsageError: if there are fewer.
        """
        threads = threads or default_host_threads(device.type)
        division = divide_cores(threads)
        return cls(threads, division, DeviceCores(division) if device.type == "cpu" else None)

    def start(self, config: ModelConfig, part: HostPart, device: torch.device) -> HostAttention:
        """Have it attend over a part of the host pool for the device."""
        keys, values = part.blocks.unbind(1)
        cores = self.division.host
        return HostAttention(config, keys.unbind(), values.unbind(), device, threads=self.threads, cores=cores)

    def close(self) -> None:
        """Let the device have all cores again."""
        if self.device is not None:
            self.device.close()
