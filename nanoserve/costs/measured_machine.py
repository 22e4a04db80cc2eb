"""This machine in the terms of the cost model, from speeds that were measured within a second. No torch.

``nanoserve profile`` (profile.py) takes minutes and covers one device. An engine with several workers measures its
speeds at every start (measuring_speeds.py of the runtime) and decides by them.
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
    """The speeds that each worker reaches while all work: the mean over the workers.

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
    """Bytes per second between workers: bus bandwidth of an all-reduce. Infinite for one worker."""
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
    """A node of `devices` workers.

    Args:
        speeds: what each worker reaches.
        devices: how many, each a device of its own to the cost model, whatever processor they share.
        memory_bytes: memory of one device; 0 if it does not matter, as for predictors.
        host_memory_bytes: host memory of the node, for pairs of layouts; 0 if it does not matter.
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
        host_link=Link(name="to host memory", bandwidth=speeds.host_link_bandwidth, latency=0.0, measured=True),
        host_memory_bytes=host_memory_bytes,
        source="measured at start",
    )


def precision_of(dtype: str) -> Precision:
    """The precision with every number in this torch dtype: float32, bfloat16 or float16.

    Raises:
        UsageError: for another name.
    """
    if dtype not in _BITS:
        raise UsageError(f"unknown number format {dtype!r}; use one of {', '.join(_BITS)}")
    return Precision.of(_BITS[dtype])


def layout_predictors(
    machine: Machine, model: ModelConfig, dtype: str, layouts: Sequence[ParallelLayout]
) -> tuple[CostPredictor, ...]:
    """A predictor for each layout: the times of its steps, and of changing to the others.

    Args:
        machine: with at least as many devices as a replica of each layout.
        model: the whole model.
        dtype: of weights, keys and values, as torch calls it.
        layouts: by number; only one replica of each counts.

    Raises:
        UsageError: if a layout does not suit the model or the machine.
    """
    costs = [StepCosts(model, machine, layout, precision_of(dtype)) for layout in layouts]
    return tuple(CostPredictor(one, costs) for one in costs)
