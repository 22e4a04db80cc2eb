"""Times of an executor: of a plan's rows, of a change of layout, of a swap, of attention on the
CPU.

Workers report them afterwards, a simulated executor as soon as it has a plan. All moments are
seconds on the executor's clock, for workers ``time.monotonic()``, which all processes of a machine
share. Ranks are stage-major: stage * tensor-parallel degree + rank within the stage.
"""

from typing import Literal

import msgspec


class StageTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One worker's part in one plan, in the order in which it happens; ``prepared`` may come after
    ``arrived``."""

    step: int
    rank: int
    tokens: int
    """Tokens that the plan computes."""
    received: float
    prepared: float
    """When its inputs were ready; a thread prepares them while another plan computes."""
    began: float  # when the worker was free and turned to the plan
    # when the previous stage's activations had arrived; ``began`` in the first stage
    arrived: float
    computed: float  # when the device's work was done
    sent: float  # when the activations left for the next stage, or the answer for the engine

    @property
    def started(self) -> float:
        """When the device's work could begin: worker free, inputs ready and activations
        received."""
        return max(self.began, self.arrived, self.prepared)


class ReshardTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One worker's part in a change of layout (Seesaw, section 4.1); it does nothing else
    meanwhile."""

    step: int  # the plan that holds the transition
    rank: int
    layout: int
    """Number of the new layout."""
    num_bytes: int  # bytes of the parameters that received new values; 0 in a simulation
    began: float
    ended: float


class SwapTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One worker's part in a `Swap`, which has fields of the same names, beside its computing."""

    swap: int
    rank: int
    direction: Literal["out", "in"]
    num_bytes: int
    """Bytes that this worker moved; 0 in a simulation."""
    began: float
    ended: float
    after_row: bool = False
    """If set, most of the time is spent waiting for layers to be computed."""


class HostTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Attention on a simulated CPU: one layer, or a whole asymmetric step. Real CPUs report
    `HostWork`."""

    began: float
    ended: float
    seconds: float
    """Time that the CPU computed attention between ``began`` and ``ended``."""
    sequences: int


Move = ReshardTimes | SwapTimes
Beside = Move | HostTimes
Times = StageTimes | Beside
