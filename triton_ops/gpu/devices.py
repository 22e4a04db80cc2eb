"""Properties of a GPU that a launcher asks for."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Gpu:
    """`generation` is the major number of the compute capability; a multiprocessor runs a few
    programs at a time."""

    generation: int
    multiprocessors: int

    @property
    def launches_dependents(self) -> bool:
        """Whether a grid may begin while the one before it ends (from Hopper on)."""
        return self.generation >= 9 and self is not INTERPRETED


INTERPRETED = Gpu(generation=9, multiprocessors=2)
"""Triton's interpreter, which runs programs on the CPU, counts as a GPU that few programs fill."""


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU behind `device`."""
    if device.type == "cpu":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Gpu(generation=properties.major, multiprocessors=properties.multi_processor_count)
