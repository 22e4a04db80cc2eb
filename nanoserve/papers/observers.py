"""What a figure needs beside a run's result: its steady state, and single steps of it."""

import math
from collections.abc import Sequence

import msgspec

from nanoserve.costs.work import StepWork
from nanoserve.scheduler.plan import StepPlan
from nanoserve.simulator.pipeline import Passage


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


class SteadyWindow:
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
        self._newest: tuple[int, Sequence[Passage]] = (0, ())

    @property
    def is_open(self) -> bool:
        """Whether steps count now."""
        return self._first <= len(self._answered) < self._last

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A step enters the pipeline."""
        counts = self.is_open
        for begin in plan.begin:
            if begin.sequence not in self._answered:
                self._prompts[begin.sequence] = begin.prompt_length
        gained = self._gained(plan)
        if counts:
            self._count(now, work)
            self._newest = (gained, passages)

    def _gained(self, plan: StepPlan) -> int:
        """Output tokens of the step, and the prompts that are computed with it."""
        gained = 0
        for row in plan.rows:
            if row.sample:
                gained += 1 + self._prompts.pop(row.sequence, 0)
                self._answered.add(row.sequence)
        return gained

    def _count(self, now: float, work: StepWork) -> None:
        """What the step before came to, for only now it is known to lie within the window; and this one's tokens."""
        gained, passages = self._newest
        if not self._steps:
            self._begin = now
        self._end = now
        self._tokens += gained
        self._busy = self._busy or [0.0] * len(passages)
        for stage, passage in enumerate(passages):
            self._busy[stage] += passage.end - passage.start
        tokens = work.tokens
        self._steps += 1
        self._sum += tokens
        self._squares += tokens * tokens
        self._decodes += work.decodes
        self._prefill += tokens - work.decodes

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


class StepLog:
    """Keeps single steps from the window's beginning on, whether it closes or not.

    Args:
        window: observes too, before this.
        limit: steps at most.
    """

    def __init__(self, window: SteadyWindow, limit: int) -> None:
        self.samples: list[StepSample] = []
        self._window, self._limit = window, limit

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """A step enters the pipeline."""
        begun = bool(self.samples) or self._window.is_open
        if begun and len(self.samples) < self._limit:
            spans = tuple((passage.start, passage.end) for passage in passages)
            self.samples.append(StepSample(now, work.tokens - work.decodes, work.decodes, spans))
