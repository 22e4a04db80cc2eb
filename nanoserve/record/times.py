"""What an executor did when: for one plan's rows, for a change of layout, for a swap, for attention on the CPU.

Workers tell it afterwards, a simulated executor as soon as it has a plan. All moments are seconds on the executor's
clock, which for workers is ``time.monotonic()``: one clock for all processes of a machine, and another one elsewhere.
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
    """Parameters that were filled with other values; 0 where it is simulated."""
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
    """What this worker moved; 0 where it is simulated."""
    began: float
    ended: float
    """Begin and end of the copying."""
    after_row: bool = False
    """As in `Swap`; most of that time is spent waiting for layers to be computed then."""


class HostTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Attention on a simulated CPU: one layer, or a whole asymmetric step. Real ones tell `HostWork` with a result."""

    began: float
    ended: float
    seconds: float
    """How long the CPU attended between these moments."""
    sequences: int


Move = ReshardTimes | SwapTimes
"""What a worker moved between device and host memory."""
Beside = Move | HostTimes
"""What goes on beside the stages' computing."""
Times = StageTimes | Beside
