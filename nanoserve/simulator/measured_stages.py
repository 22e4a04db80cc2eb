"""MeasuredStages: a pipeline whose stages take what they took in a real run, for the simulator to run again."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple, TypeVar

from nanoserve.costs.curves import interpolate
from nanoserve.costs.work import Chunk, StepWork

Key = TypeVar("Key")


class MeasuredStep(NamedTuple):
    """What one plan took, in seconds.

    Attributes:
        work: what the plan amounted to.
        stages: for each stage, computing it.
        sends: for each stage but the last, its activations on their way to the next stage.
        host: until the first stage had its inputs, from the moment at which the plan could be made.
    """

    work: StepWork
    stages: tuple[float, ...]
    sends: tuple[float, ...]
    host: float


class MeasuredStages:
    """StepTimes: a micro-batch that was measured takes what it took; another one, what its number of tokens suggests.

    Where arrivals fall between other steps than they did in the real run, the scheduler makes other micro-batches;
    between the numbers of tokens that were measured, times lie on straight lines.

    Args:
        steps: at least one, each of the same number of stages.

    Attributes:
        num_stages: of the pipeline.
        unmeasured: micro-batches that were asked for and had not been measured.
    """

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        self.num_stages = len(steps[0].stages)
        self.unmeasured = 0
        self._by_work = {work: _mean(work, same) for work, same in _grouped(steps, lambda step: step.work).items()}
        by_tokens = _grouped(steps, lambda step: step.work.tokens)
        self._sizes = sorted(by_tokens)
        self._by_tokens = [_mean(by_tokens[size][0].work, by_tokens[size]) for size in self._sizes]

    def work(
        self, decode_contexts: Sequence[int] = (), chunks: Iterable[Chunk] = (), sampled: int | None = None
    ) -> StepWork:
        """Sum a micro-batch up."""
        work = StepWork.of(decode_contexts, chunks, sampled)
        self.unmeasured += work not in self._by_work
        return work

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        """What one stage computed on it."""
        return self._seconds(work, lambda step: step.stages[stage])

    def send_seconds(self, work: StepWork, stage: int) -> float:
        """Its activations, from this stage to the next."""
        return self._seconds(work, lambda step: step.sends[stage])

    def host_seconds(self, work: StepWork) -> float:
        """Making the plan, telling the workers, preparing its inputs."""
        return self._seconds(work, lambda step: step.host)

    def _seconds(self, work: StepWork, part: Callable[[MeasuredStep], float]) -> float:
        if work in self._by_work:
            return part(self._by_work[work])
        seconds = [part(step) for step in self._by_tokens]
        return seconds[0] if len(seconds) == 1 else interpolate(self._sizes, seconds, work.tokens)


def _grouped(steps: Sequence[MeasuredStep], key: Callable[[MeasuredStep], Key]) -> dict[Key, list[MeasuredStep]]:
    groups: dict[Key, list[MeasuredStep]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return groups


def _mean(work: StepWork, steps: Sequence[MeasuredStep]) -> MeasuredStep:
    """Of each part."""
    stages = tuple(fmean(times) for times in zip(*(step.stages for step in steps), strict=True))
    sends = tuple(fmean(times) for times in zip(*(step.sends for step in steps), strict=True))
    return MeasuredStep(work, stages, sends, fmean(step.host for step in steps))
