"""Properties of a GPU that a launcher asks for."""

from dataclasses import dataclass
from functools import cache

import torch

from triton_ops.gpu.configurations import OLDEST_WITH_DEPENDENT_LAUNCHES


@dataclass(frozen=True, slots=True)
class Gpu:
    """`generation` is the major number of the compute capability; a multiprocessor runs a few
    programs at a time."""

    generation: int
    multiprocessors: int

    @property
    def dependent_launch(self) -> dict[str, bool]:
        """Return the keywords that launch a program which waits for the grid before it by itself
        (`kernels/dependent.py`), where the GPU can do that: from Hopper on."""
        if self.generation >= OLDEST_WITH_DEPENDENT_LAUNCHES and self is not INTERPRETED:
            return {"DEPENDENT": True, "launch_pdl": True}
        return {"DEPENDENT": False}


INTERPRETED = Gpu(generation=9, multiprocessors=2)
"""Triton's interpreter, which runs programs on the CPU, counts as a GPU that few programs fill."""


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind `device`."""
    if device.type == "cpu":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Gpu(generation=properties.major, multiprocessors=properties.multi_processor_count)
