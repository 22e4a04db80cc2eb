"""The few factors between what data sheets promise and what programs reach: the same for every policy and device."""

import math
from dataclasses import dataclass, fields

from nanoserve.errors import UsageError

_SHARES = ("matrix", "attention", "memory", "link", "processor", "usable_memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of data-sheet figures, and times that no data sheet has. docs/costs.md says where each default is from.

    Shares do not apply to figures marked as measured: those were reached.

    Raises:
        UsageError: for a share outside (0, 1], or a negative time.
    """

    matrix: float = 0.7
    """Share of a device's operations that matrix products reach."""
    attention: float = 0.5
    """Share of a device's operations that the attention of prompts reaches."""
    memory: float = 0.8
    """Share of a device's memory bandwidth."""
    link: float = 0.75
    """Share of a link's bandwidth."""
    processor: float = 0.6
    """Share of a CPU's memory bandwidth and operations that attention reaches."""
    usable_memory: float = 0.9
    """Share of a device's memory for weights and KV cache; the rest is for activations and libraries."""
    kernel_seconds: float = 3e-6
    """Seconds from one kernel's end to the next one's full speed."""
    kernels_per_layer: int = 10
    """Kernels of a layer (norms, qkv, rotary embedding, cache write, attention, output, gate_up, activation, down),
    all-reduces aside."""
    step_seconds: float = 1e-3
    row_seconds: float = 10e-6
    """The host's work for a step, and for each sequence in it."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SHARES and not 0 < value <= 1:
                raise UsageError(f"{field.name} is a share above 0 and at most 1, not {value}")
            if not 0 <= value < math.inf:
                raise UsageError(f"{field.name} must not be negative, found {value}")

    @classmethod
    def ideal(cls) -> "Efficiency":
        """Everything that data sheets promise, and no overhead: the limits that closed forms describe."""
        overheads = {"kernel_seconds": 0.0, "kernels_per_layer": 0, "step_seconds": 0.0, "row_seconds": 0.0}
        return cls(**dict.fromkeys(_SHARES, 1.0), **overheads)  # type: ignore[arg-type]
