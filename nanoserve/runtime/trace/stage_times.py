"""What a worker did when: for one plan's rows, for a change of layout, for a swap.

Traces, benchmarks and the simulator's replays are made of these. All moments are seconds of ``time.monotonic()``, one
clock for all processes of a machine; workers on different machines have different clocks.
"""

from typing import Literal

import msgspec


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """One worker's part in one plan, in the order in which it happens; ``prepared`` may come after ``arrived``."""

    step: int
    """The plan."""
    rank: int
    """The worker's, stage-major: stage * tensor-parallel degree + rank within the stage."""
    tokens: int
    """That the plan computes."""
    received: float
    """When the plan came."""
    prepared: float
    """When its inputs were ready, which a thread of the worker sees to while another plan computes."""
    began: float
    """When the worker was free and turned to the plan."""
    arrived: float
    """When the activations of the stage before were there; ``began`` in the first stage."""
    computed: float
    """When the device's work was done."""
    sent: float
    """When the activations were on their way to the next stage, or the answer to the engine."""

    @property
    def started(self) -> float:
        """When the device's work could begin: the worker was free, its inputs ready and the activations there."""
        return max(self.began, self.arrived, self.prepared)


class ReshardTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One worker's part in a change of layout (Seesaw, section 4.1)."""

    step: int
    """The plan that holds the transition."""
    rank: int
    """The worker's."""
    layout: int
    """The new one's number."""
    num_bytes: int
    """Of parameters that were filled with other values."""
    began: float
    ended: float
    """With nothing else going on."""


class SwapTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One worker's part in moving a sequence's blocks between its device and host memory, beside its computing."""

    swap: int
    rank: int
    """The worker's."""
    direction: Literal["out", "in"]
    """``swap``, ``direction``: as in `Swap`."""
    num_bytes: int
    """That this worker moved."""
    began: float
    ended: float
    """Of the copying."""
    after_row: bool = False
    """As in `Swap`; most of that time is spent waiting for layers to be computed then."""
