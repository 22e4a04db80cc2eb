"""What a worker did when: for one plan's rows, for a change of layout, for a swap.

Traces, benchmarks and the simulator's replays are made of these. All moments are seconds of ``time.monotonic()``, one
clock for all processes of a machine; workers on different machines have different clocks.
"""

from typing import Literal

import msgspec


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """One worker's part in one plan, in the order in which it happens; ``prepared`` may come after ``arrived``.

    Attributes:
        step: the plan.
        rank: the worker's, stage-major: stage * tensor-parallel degree + rank within the stage.
        tokens: that the plan computes.
        received: when the plan came.
        prepared: when its inputs were ready, which a thread of the worker sees to while another plan computes.
        began: when the worker was free and turned to the plan.
        arrived: when the activations of the stage before were there; ``began`` in the first stage.
        computed: when the device's work was done.
        sent: when the activations were on their way to the next stage, or the answer to the engine.
    """

    step: int
    rank: int
    tokens: int
    received: float
    prepared: float
    began: float
    arrived: float
    computed: float
    sent: float

    @property
    def started(self) -> float:
        """When the device's work could begin: the worker was free, its inputs ready and the activations there."""
        return max(self.began, self.arrived, self.prepared)


class ReshardTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One worker's part in a change of layout (Seesaw, section 4.1).

    Attributes:
        step: the plan that holds the transition.
        rank: the worker's.
        layout: the new one's number.
        num_bytes: of parameters that were filled with other values.
        began, ended: with nothing else going on.
    """

    step: int
    rank: int
    layout: int
    num_bytes: int
    began: float
    ended: float


class SwapTimes(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One worker's part in moving a sequence's blocks between its device and host memory, beside its computing.

    Attributes:
        swap, direction: as in `Swap`.
        rank: the worker's.
        num_bytes: that this worker moved.
        began, ended: of the copying.
        after_row: as in `Swap`; most of that time is spent waiting for layers to be computed then.
    """

    swap: int
    rank: int
    direction: Literal["out", "in"]
    num_bytes: int
    began: float
    ended: float
    after_row: bool = False
