"""StageTimes: what a worker did when for one plan. Traces, benchmarks and the simulator's replays are made of these."""

import msgspec


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """One worker's part in one plan, in the order in which it happens; ``prepared`` may come after ``arrived``.

    All moments are seconds of ``time.monotonic()``, one clock for all processes of a machine; workers on different
    machines have different clocks.

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
