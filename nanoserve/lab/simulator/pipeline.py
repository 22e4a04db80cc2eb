"""A pipeline of stages and links in virtual time: when each micro-batch enters and leaves each
stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast, runtime_checkable

from nanoserve.errors import UsageError
from nanoserve.scheduler.work import Chunk, StepWork

PAPERS_PREPARATION_SHARE = 0.17
"""gLLM, section 3.4: input preparation in a coupled design (vLLM), as a share of the whole
execution time."""


class StepTimes(Protocol):
    """How long things take; ``nanoserve.costs.StepCosts`` is one. Times are seconds."""

    num_stages: int

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        """Sum a micro-batch up."""

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        """Time that one stage computes on a micro-batch."""

    def send_seconds(self, work: StepWork, stage: int) -> float:
        """Time to send the activations from this stage to the next; the last stage is never
        asked."""

    def host_seconds(self, work: StepWork) -> float:
        """Time that the CPU takes to prepare the inputs of a stage."""


class MovingTimes(StepTimes, Protocol):
    """Step times that also know what moves between device and host memory."""

    def swap_seconds(self, tokens: int, stage: int) -> float:
        """Time to move the KV of ``tokens`` tokens of one stage between device and host, one
        way."""

    def reload_seconds(self, stage: int) -> float:
        """Time to load a stage's weights from host memory."""


@runtime_checkable
class TieredTimes(MovingTimes, Protocol):
    """Step times that also know the host's memory and processor; ``nanoserve.costs.StepCosts`` are
    such."""

    num_layers: int

    def layers_seconds(self, tokens: int, stage: int) -> float:
        """Time of the linear part of a stage's layers for ``tokens`` tokens."""

    def attention_seconds(self, work: StepWork, stage: int) -> float:
        """Time of the attention of a stage's layers on the device."""

    def ends_seconds(self, work: StepWork, stage: int) -> float:
        """Time of a stage outside its layers; the sum with the two above is ``stage_seconds``."""

    def host_attention_seconds(self, context: int) -> float:
        """Time of one layer's decode attention on the CPU over ``context`` keys."""

    def host_exchange_seconds(self, rows: int) -> float:
        """Time to move one layer's queries, keys, values and results of ``rows`` rows between
        device and host."""


@runtime_checkable
class SharingTimes(StepTimes, Protocol):
    """Step times of stages that share the memory's bandwidth: ``stage_seconds`` are the times while
    all stages compute."""

    def lone_seconds(self, work: StepWork, stage: int) -> float:
        """Time that one stage computes on a micro-batch while no other does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How the processes of a pipeline work together; raises UsageError for a share outside [0,
    1)."""

    metadata: Literal["decoupled", "coupled"] = "decoupled"
    """"decoupled" (gLLM, section 3.3): plans are sent ahead of the activations, so that a stage
    prepares its inputs while it computes the micro-batch before. "coupled" (vLLM): they come with
    the activations, and preparing precedes computing."""
    preparation_share: float | None = None
    """Preparing a stage's inputs, as a share of preparing and computing; None takes what the step
    times say of the host."""

    def __post_init__(self) -> None:
        if self.preparation_share is not None and not 0 <= self.preparation_share < 1:
            raise UsageError(
                f"preparation_share must be at least 0 and below 1, not {self.preparation_share}"
            )


COUPLED = Runtime(metadata="coupled", preparation_share=PAPERS_PREPARATION_SHARE)
DECOUPLED = Runtime()


class Passage(NamedTuple):
    """A stage computes one micro-batch, from ``start`` to ``end`` in seconds."""

    start: float
    end: float


class Pipeline:
    """Stages that compute one micro-batch at a time, joined by links that carry one at a time, all
    in order."""

    def __init__(self, times: StepTimes, runtime: Runtime) -> None:
        stages = times.num_stages
        # what each stage has computed so far; preparing inputs is not computing
        self.busy_seconds = [0.0] * stages
        self._times, self._runtime = times, runtime
        self._stage_free, self._host_free, self._link_free = (
            [0.0] * stages,
            [0.0] * stages,
            [0.0] * stages,
        )
        self._shares = isinstance(times, SharingTimes)
        # when each will have left the last stage
        self._under_way: list[tuple[float, StepWork]] = []

    def run(self, work: StepWork, now: float, behind: float = 0.0) -> list[Passage]:
        """Send a micro-batch in; returns its passage through each stage. The last one works longer,
        by ``behind``."""
        passages, arrived, times = list[Passage](), now, self._times
        self._under_way = [one for one in self._under_way if one[0] > now]
        last, preparation = times.num_stages - 1, times.host_seconds(work)
        for stage in range(last + 1):
            computing = self._seconds(work, stage)
            if stage == last:
                computing += behind
            start = self._start(stage, arrived, now, preparation, computing)
            end = self._stage_free[stage] = start + computing
            self.busy_seconds[stage] += computing
            passages.append(Passage(start, end))
            if stage < last:
                arrived = self._link_free[stage] = max(
                    end, self._link_free[stage]
                ) + times.send_seconds(work, stage)
        self._under_way.append((passages[-1].end, work))
        return passages

    def _seconds(self, work: StepWork, stage: int) -> float:
        """Time that a stage computes. It shares the memory as long as micro-batches beside it
        compute. Micro-batches that follow are assumed to be like the ones under way, since a policy
        fills the pipeline again and again."""
        crowded, times = self._times.stage_seconds(work, stage), self._times
        if not self._shares or not crowded or times.num_stages == 1:
            return crowded
        lone = cast(SharingTimes, times).lone_seconds
        alone = lone(work, stage)
        beside = sum([min(1.0, lone(other, stage) / alone) for _, other in self._under_way])
        return alone + min(1.0, beside / (times.num_stages - 1)) * (crowded - alone)

    def begin(self, work: StepWork, now: float) -> float:
        """When a pipeline of one stage could compute a step that is submitted now, its inputs
        prepared."""
        return self._start(
            0, now, now, self._times.host_seconds(work), self._times.stage_seconds(work, 0)
        )

    def occupy(self, passage: Passage) -> None:
        """Mark the only stage as computing during this passage."""
        self._stage_free[0] = passage.end
        self.busy_seconds[0] += passage.end - passage.start

    def not_before(self, time: float) -> None:
        self._stage_free = [max(free, time) for free in self._stage_free]

    def _start(
        self, stage: int, arrived: float, submitted: float, preparation: float, computing: float
    ) -> float:
        """When the stage begins to compute what has arrived; ``preparation`` is what the step times
        say of the host."""
        if (share := self._runtime.preparation_share) is not None:
            preparation = computing * share / (1 - share)
        ready = max(arrived, self._stage_free[stage])
        if self._runtime.metadata == "coupled":
            return ready + preparation
        prepared = self._host_free[stage] = max(submitted, self._host_free[stage]) + preparation
        return max(ready, prepared)
