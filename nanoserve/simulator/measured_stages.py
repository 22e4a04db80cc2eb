"""MeasuredStages: a pipeline whose stages take what they took in a real run, for the simulator to run again."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from nanoserve.costs.work import Chunk, StepWork

_ABOUT = 1.25
"""Numbers of tokens within this factor are about the same."""


class MeasuredStep(NamedTuple):
    """What one plan took, in seconds."""

    work: StepWork
    """What the plan amounted to."""
    stages: tuple[float, ...]
    """Time that each stage computed."""
    sends: tuple[float, ...]
    """Time that the activations took to the next stage, for each stage but the last."""
    host: float
    """Time from the moment at which the plan could be made until the first stage had its inputs."""


class MeasuredStages:
    """StepTimes, asked about one plan after another: each takes what the plan in its place took in the real run.

    Where arrivals fall between other plans than they did in the real run, the scheduler makes other micro-batches. Such
    a one takes what the nearest plan, in their order, took that had about as many tokens: what a machine does beside
    its steps comes and goes with time.

    Args:
        steps: each of the same number of stages, in the order of the plans; without any there is one stage.
        swap_token_seconds: mean time of a swap between device and host memory, per token, until all stages are done.
        reload_seconds: mean time of a change to this layout, from plan to answer.
    """

    def __init__(
        self, steps: Sequence[MeasuredStep], *, swap_token_seconds: float = 0.0, reload_seconds: float = 0.0
    ) -> None:
        self._swap_token_seconds, self._reload_seconds = swap_token_seconds, reload_seconds
        self.num_stages = len(steps[0].stages) if steps else 1  # stages of the pipeline
        self.others = 0  # micro-batches that were not those of the real run
        self._steps = steps
        self._places = count()
        self._step: MeasuredStep
        """What is asked about."""

    def work(
        self, decode_contexts: Sequence[int] = (), chunks: Iterable[Chunk] = (), sampled: int | None = None
    ) -> StepWork:
        """Sum the next micro-batch up; what is asked from here on is about it."""
        work = StepWork.of(decode_contexts, chunks, sampled)
        place = min(next(self._places), len(self._steps) - 1)
        self._step = self._steps[place]
        if self._step.work != work:
            self.others += 1
            self._step = self._nearest(work.tokens, place)
        return work

    def _nearest(self, tokens: int, place: int) -> MeasuredStep:
        """Return the nearest step in order with about ``tokens`` tokens; if none has, the closest number counts."""
        factors = [_factor(step.work.tokens, tokens) for step in self._steps]
        accepted = max(_ABOUT, min(factors))
        nearest = min((abs(other - place), other) for other, factor in enumerate(factors) if factor <= accepted)
        return self._steps[nearest[1]]

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        """What one stage computed on it."""
        return self._step.stages[stage]

    def send_seconds(self, work: StepWork, stage: int) -> float:
        """Its activations, from this stage to the next."""
        return self._step.sends[stage]

    def host_seconds(self, work: StepWork) -> float:
        """Making the plan, telling the workers, preparing its inputs."""
        return self._step.host

    def swap_seconds(self, tokens: int, stage: int) -> float:
        """Moving the KV of this many tokens, of all stages at once."""
        return self._swap_token_seconds * tokens

    def reload_seconds(self, stage: int) -> float:
        """Changing to this layout, in all stages at once."""
        return self._reload_seconds


def _factor(tokens: int, others: int) -> float:
    """The larger over the smaller; a plan may be without tokens."""
    low, high = sorted((tokens, others))
    return (high + 1) / (low + 1)
