"""The machine at hand as the cost model takes it, from speeds that were measured within a second. No torch.

``nanoserve profile`` (profile.py) takes minutes and knows one device; an engine of several workers asks at every start,
by measuring_speeds.py of the runtime, and decides by what it gets.
"""

import math
from collections.abc import Sequence

import msgspec

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import Precision
from nanoserve.costs.hardware import Device, Link, Machine
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout

_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


class MachineSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker reaches while all others do the same; the mean over all of them.

    Raises:
        ValueError: for a speed that is not above 0, or a latency below.
    """

    memory_bandwidth: float
    """Bytes of weights per second that products with a small batch read."""
    flops: float
    """Operations per second of products with many rows, in the number format of the weights."""
    host_link_bandwidth: float
    """Bytes per second between the device and host memory, in the slower direction. On a CPU, of copies within memory,
    bytes that are moved counted once."""
    link_bandwidth: float = math.inf
    """Bytes per second between workers: bus bandwidth of an all-reduce. Infinite for one alone."""
    link_latency: float = 0.0
    """Seconds of one message between them; an all-reduce over t workers takes 2 ceil(log2 t)."""

    def __post_init__(self) -> None:
        for name in ("memory_bandwidth", "flops", "host_link_bandwidth", "link_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.link_latency < math.inf:
            raise ValueError(f"link_latency must be 0 or more, not {self.link_latency}")


def measured_machine(
    speeds: MachineSpeeds,
    *,
    devices: int,
    memory_bytes: float = 0.0,
    host_memory_bytes: float = 0.0,
) -> Machine:
    """A node of so many workers.

    Args:
        speeds: of each.
        devices: how many, each a device of its own to the cost model, whatever processor they share.
        memory_bytes: of one of them; 0 if nobody asks, as predictors do not.
        host_memory_bytes: of the node, for pairs of layouts; 0 if nobody asks.
    """
    return Machine(
        name="this machine",
        device=Device(
            name="this machine",
            memory_bytes=memory_bytes,
            memory_bandwidth=speeds.memory_bandwidth,
            flops=speeds.flops,
            measured=True,
        ),
        devices_per_node=devices,
        link=Link(name="between workers", bandwidth=speeds.link_bandwidth, latency=speeds.link_latency, measured=True),
        network=None,
        host_link=Link(name="to host memory", bandwidth=speeds.host_link_bandwidth, latency=0.0, measured=True),
        processor=None,
        host_memory_bytes=host_memory_bytes,
        source="measured at start",
    )


def precision_of(dtype: str) -> Precision:
    """Every number in the format that torch calls so: float32, bfloat16 or float16.

    Raises:
        UsageError: for another name.
    """
    if dtype not in _BITS:
        raise UsageError(f"unknown number format {dtype!r}; use one of {', '.join(_BITS)}")
    bits = _BITS[dtype]
    return Precision(weight_bits=bits, kv_bits=bits, other_bits=bits)


def layout_predictors(
    machine: Machine, model: ModelConfig, dtype: str, layouts: Sequence[ParallelLayout]
) -> tuple[CostPredictor, ...]:
    """What the Scheduler takes: for each layout, what its steps take and what changing to the others does.

    Args:
        machine: with at least as many devices as a replica of each layout.
        model: the whole of it.
        dtype: of weights, keys and values, as torch calls it.
        layouts: by number; only one replica of each counts.

    Raises:
        UsageError: if a layout does not suit the model or the machine.
    """
    costs = [StepCosts(model, machine, layout, precision_of(dtype)) for layout in layouts]
    return tuple(CostPredictor(one, costs) for one in costs)
