"""What a figure needs beside a run's result: its steady state, and single steps of it."""

import math
from collections.abc import Sequence

import msgspec

from nanoserve.record.events import Planned, StepObserver
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.plan import StepPlan


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The steady state of a run."""

    seconds: float
    """How long it was looked at."""
    tokens_per_second: float
    """Prompt and output tokens; a prompt counts when its first token is known, and only once."""
    bubble_share: float
    """Share of the time in which a stage computed nothing, mean over stages."""
    step_tokens: float
    """Mean of a micro-batch."""
    variation: float
    """Standard deviation of a micro-batch's tokens over their mean."""
    prefill_tokens: float
    decodes: float
    """Prompt tokens and decodes of a micro-batch, on average."""


class SteadyWindow(StepObserver):
    """Measures between two moments of progress, so that a run's start and its end do not dilute the metrics.

    At the start memory is empty and nothing decodes; at the end a few long answers drain. The window lies between the
    first tokens of two requests, counted in the order in which they come: the same share of the work for every policy.

    Args:
        requests: in all.
        first, last: shares of them that have their first tokens when the window begins and ends.
    """

    def __init__(self, requests: int, first: float, last: float) -> None:
        self._first, self._last = math.ceil(requests * first), math.ceil(requests * last)
        self._prompts: dict[int, int] = {}
        self._answered: set[int] = set()
        self._begin = self._end = 0.0
        self._tokens = self._steps = self._prefill = self._decodes = 0
        self._sum = self._squares = 0.0
        self._busy: list[float] = []
        self._newest: tuple[int, Sequence[StageTimes]] = (0, ())

    @property
    def is_open(self) -> bool:
        """Whether steps count now."""
        return self._first <= len(self._answered) < self._last

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        """A step enters the pipeline."""
        counts = self.is_open
        for begin in planned.plan.begin:
            if begin.sequence not in self._answered:
                self._prompts[begin.sequence] = begin.prompt_length
        gained = self._gained(planned.plan)
        if counts:
            self._count(planned)
            self._newest = (gained, stages)

    def _gained(self, plan: StepPlan) -> int:
        """Output tokens of the step, and the prompts that are computed with it."""
        gained, prompts = 0, self._prompts
        for row in plan.rows:
            if row.sample:
                gained += 1
                if row.sequence in prompts:
                    gained += prompts.pop(row.sequence)
                    self._answered.add(row.sequence)
        return gained

    def _count(self, planned: Planned) -> None:
        """What the step before came to, for only now it is known to lie within the window; and this one's tokens."""
        gained, stages = self._newest
        if not self._steps:
            self._begin = planned.time
        self._end = planned.time
        self._tokens += gained
        self._busy = self._busy or [0.0] * len(stages)
        for stage, times in enumerate(stages):
            self._busy[stage] += times.computed - times.started
        tokens = planned.tokens
        self._steps += 1
        self._sum += tokens
        self._squares += tokens * tokens
        self._decodes += planned.decodes
        self._prefill += planned.prompt_tokens

    def result(self) -> Steady:
        """The steady state, from the steps that began in the window.

        Raises:
            ValueError: if there were too few of them.
        """
        seconds = self._end - self._begin
        if self._steps < 2 or seconds <= 0:
            raise ValueError("too few steps to speak of a steady state: take more requests")
        mean = self._sum / self._steps
        deviation = math.sqrt(max(0.0, self._squares / self._steps - mean * mean))
        return Steady(
            seconds=seconds,
            tokens_per_second=self._tokens / seconds,
            bubble_share=1 - sum(self._busy) / len(self._busy) / seconds,
            step_tokens=mean,
            variation=deviation / mean,
            prefill_tokens=self._prefill / self._steps,
            decodes=self._decodes / self._steps,
        )


class StepSample(msgspec.Struct, frozen=True):
    """One step: when it was planned, its tokens, and its passage through each stage."""

    time: float
    prefill_tokens: int
    decodes: int
    passages: tuple[tuple[float, float], ...]


class StepLog(StepObserver):
    """Keeps single steps from the window's beginning on, whether it closes or not.

    Args:
        window: observes too, before this.
        limit: steps at most.
    """

    def __init__(self, window: SteadyWindow, limit: int) -> None:
        self.samples: list[StepSample] = []
        self._window, self._limit = window, limit

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        """A step enters the pipeline."""
        begun = bool(self.samples) or self._window.is_open
        if begun and len(self.samples) < self._limit:
            spans = tuple((times.started, times.computed) for times in stages)
            self.samples.append(StepSample(planned.time, planned.prompt_tokens, planned.decodes, spans))
