"""Events of a run, in the order in which they become known. An observer is called with each of
them.

Times are the executor's; ``clock`` is the engine's, on which all that happens between two results
has one moment if the engine's clock is stepped, as it is for a replay.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from nanoserve.record.times import Beside, StageTimes
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.optional import Tier
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import StepFeatures


class States(msgspec.Struct, frozen=True):
    """The slots of recurrent states, between two plans."""

    slots: int
    working: int
    """Sequences that run in a slot of their own."""
    snapshots: int
    """Slots at which a cached prefix can be resumed."""
    free: int
    """Slots without an owner, snapshots or not."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> "States | None":
        """Count a scheduler's slots; None if the model has no recurrent states."""
        state = scheduler.extensions.state
        if state is None:
            return None
        pool = state.pool
        return cls(pool.num_slots, state.num_working, len(pool.snapshots), pool.free_slots)


class Blocks(msgspec.Struct, frozen=True):
    """Used and all KV blocks of the current layout and of the host pool, between two plans."""

    used_device: int
    device: int
    used_host: int
    """A prompt that is still computed may have reserved some."""
    host: int
    on_device: int
    """Sequences that run on the device."""
    preemptions: int  # number of preemptions so far
    states: States | None = None

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Blocks":
        device, host = scheduler.pool, scheduler.extensions.host
        return cls(
            used_device=device.num_blocks - device.free_blocks,
            device=device.num_blocks,
            used_host=0 if host is None else host.pool.num_blocks - host.pool.free_blocks,
            host=0 if host is None else host.pool.num_blocks,
            on_device=len(scheduler.running),
            preemptions=scheduler.table.preemptions,
            states=States.of(scheduler),
        )

    @property
    def device_share(self) -> float:
        return 1 - (self.device - self.used_device) / self.device

    @property
    def host_share(self) -> float:
        """0 without a pool."""
        return 1 - (self.host - self.used_host) / self.host if self.host else 0.0


class HeldBlocks(msgspec.Struct, frozen=True):
    """A sequence's block table on one tier, between two plans; while it moves, it has two."""

    sequence: int
    tier: Tier
    blocks: tuple[int, ...]
    tokens: int
    """Tokens that they hold once everything in flight is computed."""


class Arrived(msgspec.Struct, frozen=True):
    """The engine took a request in; the time is on its clock."""

    time: float
    request: Request


class Stopped(msgspec.Struct, frozen=True):
    """A request was ended from outside, or one of its samples: ``index`` is None for all."""

    time: float
    request_id: str
    index: int | None
    reason: FinishReason


class Planned(msgspec.Struct, frozen=True):
    """A plan was made and handed to the executor."""

    time: float
    clock: float
    plan: StepPlan
    load: Load | None
    decision: Decision
    """The policy saw the load and took the decision; the load is None if no scheduler made the
    plan."""
    # blocks after the plan's rows and swaps; the plan itself says what it took and freed
    blocks: Blocks
    tables: tuple[HeldBlocks, ...] = ()
    """All block tables after the plan was made, oldest sequence first; none unless the recorder
    keeps them."""


class Worked(msgspec.Struct, frozen=True):
    """The executor reported its times. A simulated one does so after each plan, for what it will
    do."""

    stages: tuple[StageTimes, ...]
    beside: tuple[Beside, ...]


class Collected(msgspec.Struct, frozen=True):
    """Results became known, all at one moment."""

    time: float
    clock: float
    results: tuple[StepResult, ...]


class ExecutorFailed(msgspec.Struct, frozen=True):
    """Nothing that is in flight will be answered: the executor said so instead of a result."""

    time: float


class Gained(msgspec.Struct, frozen=True):
    """Sequences gained tokens, or ended; the time is on the engine's clock."""

    time: float
    updates: tuple[SequenceUpdate, ...]


class Finished(msgspec.Struct, frozen=True):
    time: float
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan was predicted, just before it is told as planned; told again once its step was
    measured."""

    step: int
    decision: Decision
    """The decision that the plan carries out, with the alternatives."""
    work: StepFeatures
    predicted: float
    measured: float | None = None
    """Predicted and measured time on the device, in seconds; None while the step is in flight."""


class Corrected(msgspec.Struct, frozen=True):
    """A predictor learned, or another one predicts from now on."""

    corrections: Mapping[str, float]
    """Correction factor of each part of a prediction."""


Event = (
    Arrived
    | Stopped
    | Planned
    | Worked
    | Collected
    | ExecutorFailed
    | Gained
    | Finished
    | Forecast
    | Corrected
)
Observer = Callable[[Event], None]


class StepObserver:
    """An observer of a simulated run, which is shown each plan together with what its stages will
    do for it."""

    _planned: Planned

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._planned = event
        elif isinstance(event, Worked):
            for times in event.beside:
                self.on_beside(self._planned, times)
            if event.stages:
                self.on_step(self._planned, event.stages)

    def on_step(self, planned: Planned, stages: tuple[StageTimes, ...]) -> None:
        """A step enters the pipeline."""

    def on_beside(self, planned: Planned, times: Beside) -> None:
        """A swap, a transition or attention on the CPU begins with it."""
