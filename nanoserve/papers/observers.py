"""What a figure needs beside a run's result: its steady state, single steps, and where the time went."""

import math
from collections.abc import Sequence

import msgspec

from nanoserve.record.events import Planned, StepObserver
from nanoserve.record.times import Beside, ReshardTimes, StageTimes
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


class StepSample(msgspec.Struct, frozen=True):
    """One step: when it was planned, its tokens, and its passage through each stage."""

    time: float
    prefill_tokens: int
    decodes: int
    passages: tuple[tuple[float, float], ...]


class SteadyWindow(StepObserver):
    """Measures between two moments of progress, so that a run's start and its end do not dilute the metrics.

    At the start memory is empty and nothing decodes; at the end a few long answers drain. The window lies between the
    first tokens of two requests, counted in the order in which they come: the same share of the work for every policy.

    Args:
        requests: in all.
        shares: shares of them that have their first tokens when the window begins and ends; None for no window.
        logged_steps: how many steps are kept from the window's beginning on, whether it closes or not.
    """

    def __init__(self, requests: int, shares: tuple[float, float] | None, logged_steps: int = 0) -> None:
        self.samples: list[StepSample] = []
        self._shares, self._logged_steps = shares, logged_steps
        self._first, self._last = (math.ceil(requests * share) for share in shares or (0.0, 0.0))
        self._prompts: dict[int, int] = {}
        self._answered: set[int] = set()
        self._begin = self._end = 0.0
        self._tokens = self._steps = self._prefill = self._decodes = 0
        self._sum = self._squares = 0.0
        self._busy: list[float] = []
        self._newest: tuple[int, Sequence[StageTimes]] = (0, ())

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        """A step enters the pipeline."""
        if self._shares is None:
            return
        was_open = self._is_open
        for begin in planned.plan.begin:
            if begin.sequence not in self._answered:
                self._prompts[begin.sequence] = begin.prompt_length
        gained = self._gained(planned.plan)
        if was_open:
            self._count(planned)
            self._newest = (gained, stages)
        if (self.samples or self._is_open) and len(self.samples) < self._logged_steps:
            spans = tuple((times.started, times.computed) for times in stages)
            self.samples.append(StepSample(planned.time, planned.plan.prompt_tokens, planned.plan.decodes, spans))

    @property
    def _is_open(self) -> bool:
        return self._first <= len(self._answered) < self._last

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
        """Count the step before, which is known only now to lie within the window, and the tokens of this one."""
        gained, stages = self._newest
        if not self._steps:
            self._begin = planned.time
        self._end = planned.time
        self._tokens += gained
        self._busy = self._busy or [0.0] * len(stages)
        for stage, times in enumerate(stages):
            self._busy[stage] += times.computed - times.started
        tokens = planned.plan.decodes + planned.plan.prompt_tokens
        self._steps += 1
        self._sum += tokens
        self._squares += tokens * tokens
        self._decodes += planned.plan.decodes
        self._prefill += planned.plan.prompt_tokens

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


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run, by what a stage computed, on average over stages (Seesaw, figure 12)."""

    prefill: float
    mixed: float
    decode: float
    """``prefill``, ``decode``, ``mixed``: steps with prompts, with answers, and with both."""
    transition: float
    """Re-sharding."""
    other: float
    """It had nothing to compute."""

    @property
    def total(self) -> float:
        return self.prefill + self.mixed + self.decode + self.transition + self.other


class PhaseClock(StepObserver):
    """What the stages compute, by kind, and when the layout changes."""

    def __init__(self) -> None:
        self._seconds = {"prefill": 0.0, "mixed": 0.0, "decode": 0.0, "transition": 0.0}
        self._phases: list[tuple[float, float, int]] = []
        self._phase_begin = self._decode_rows = 0.0
        self._layout = 0

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        """A step enters the pipeline, and it is known when it will leave."""
        kind = "decode" if not planned.plan.prompt_tokens else "mixed" if planned.plan.decodes else "prefill"
        seconds = sum([times.computed - times.started for times in stages]) / len(stages)
        self._seconds[kind] += seconds
        if kind == "decode":
            self._decode_rows += planned.plan.decodes * seconds

    def on_beside(self, planned: Planned, times: Beside) -> None:
        """The layout changes. Swaps run beside the steps; where a step waits for one, that is other time."""
        if isinstance(times, ReshardTimes):
            self._seconds["transition"] += times.ended - times.began
            self._phases.append((self._phase_begin, times.began, self._layout))
            self._phase_begin, self._layout = times.ended, times.layout

    @property
    def decodes(self) -> float:
        """Answers of a step without prompts, averaged over the time of these steps."""
        return self._decode_rows / self._seconds["decode"] if self._seconds["decode"] else 0.0

    def breakdown(self, end: float) -> Breakdown:
        """Where the time until ``end`` went."""
        return Breakdown(**self._seconds, other=max(0.0, end - sum(self._seconds.values())))

    def phases(self, end: float) -> tuple[tuple[float, float, int], ...]:
        """(begin, end, layout) of each phase, the last one until then."""
        return (*self._phases, (self._phase_begin, end, self._layout))
