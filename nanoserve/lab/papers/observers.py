"""Observers for figures that need more than a run's result: its steady state, single steps, and
where the time went."""

import math
from collections.abc import Sequence
from statistics import fmean, pstdev

import msgspec

from nanoserve.lab.step_window import WindowStep
from nanoserve.record.events import Planned, StepObserver
from nanoserve.record.times import Beside, ReshardTimes, StageTimes
from nanoserve.scheduler.plan import StepPlan


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """The steady state of a run."""

    seconds: float  # how long it was looked at
    # prompt and output tokens; a prompt counts when its first token is known, and only once
    tokens_per_second: float
    bubble_share: float  # share of the time in which a stage computed nothing, mean over stages
    step_tokens: float  # mean of a micro-batch
    variation: float  # standard deviation of a micro-batch's tokens over their mean
    prefill_tokens: float
    decodes: float
    """Prompt tokens and decodes of a micro-batch, on average."""


class SteadyWindow(StepObserver):
    """Measures between two moments of progress, so that a run's start and its end do not dilute the
    metrics.

    At the start memory is empty and nothing decodes; at the end a few long answers drain. The
    window lies between the first tokens of two requests, counted in the order in which they come:
    the same share of the work for every policy. ``shares`` are the shares of the requests that have
    their first tokens when it begins and ends; None for no window. ``logged_steps`` steps are kept
    from its beginning on, whether it closes or not.
    """

    def __init__(
        self, requests: int, shares: tuple[float, float] | None, logged_steps: int
    ) -> None:
        self.samples: list[WindowStep] = []
        self._shares, self._logged_steps = shares, logged_steps
        self._first, self._last = (math.ceil(requests * share) for share in shares or (0.0, 0.0))
        self._prompts: dict[int, int] = {}
        self._answered: set[int] = set()
        self._begin = self._end = 0.0
        self._tokens = 0
        self._steps: list[tuple[int, int]] = []  # prompt tokens and decodes of each
        self._busy: list[float] = []
        self._newest: tuple[int, Sequence[StageTimes]] = (0, ())

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        if self._shares is None:
            return
        was_open = self._is_open
        gained = self._gained(planned.plan)
        if was_open:
            self._count(planned)
            self._newest = (gained, stages)
        if (self.samples or self._is_open) and len(self.samples) < self._logged_steps:
            self.samples.append(WindowStep.of(planned, stages))

    @property
    def is_over(self) -> bool:
        return len(self._answered) >= self._last

    @property
    def _is_open(self) -> bool:
        return self._first <= len(self._answered) and not self.is_over

    def _gained(self, plan: StepPlan) -> int:
        """Output tokens of the step, and the prompts that are computed with it."""
        for begin in plan.begin:
            if begin.sequence not in self._answered:
                self._prompts[begin.sequence] = begin.prompt_length
        sampled = [row.sequence for row in plan.rows if row.sample]
        first = [sequence for sequence in sampled if sequence in self._prompts]
        self._answered.update(first)
        return len(sampled) + sum(map(self._prompts.pop, first))

    def _count(self, planned: Planned) -> None:
        """Count the step before, which is known only now to lie within the window, and the tokens
        of this one."""
        gained, stages = self._newest
        if not self._steps:
            self._begin = planned.time
        self._end = planned.time
        self._tokens += gained
        self._busy = self._busy or [0.0] * len(stages)
        for stage, times in enumerate(stages):
            self._busy[stage] += times.computed - times.started
        self._steps.append((planned.plan.prompt_tokens, planned.plan.decodes))

    def result(self) -> Steady:
        """The steady state, from the steps that began in the window. Raises ValueError if there
        were too few."""
        seconds = self._end - self._begin
        if len(self._steps) < 2 or seconds <= 0:
            raise ValueError("too few steps to speak of a steady state: take more requests")
        tokens = [sum(step) for step in self._steps]
        return Steady(
            seconds=seconds,
            tokens_per_second=self._tokens / seconds,
            bubble_share=1 - fmean(self._busy) / seconds,
            step_tokens=fmean(tokens),
            variation=pstdev(tokens) / fmean(tokens),
            prefill_tokens=fmean(prefill for prefill, _ in self._steps),
            decodes=fmean(decodes for _, decodes in self._steps),
        )


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a run, by what a stage computed, on average over stages (Seesaw, figure 12)."""

    prefill: float
    mixed: float
    decode: float
    """``prefill``, ``decode``, ``mixed``: steps with prompts, with answers, and with both."""
    transition: float  # re-sharding
    other: float  # it had nothing to compute

    @property
    def total(self) -> float:
        return self.prefill + self.mixed + self.decode + self.transition + self.other


class PhaseClock(StepObserver):
    """Measures the stages' computing time by kind, and when the layout changes."""

    def __init__(self) -> None:
        self._seconds = {"prefill": 0.0, "mixed": 0.0, "decode": 0.0, "transition": 0.0}
        self._phases: tuple[tuple[float, float, int], ...] = ()
        self._phase: tuple[float, int] = (0.0, 0)  # begin and layout of the present one
        self._decode_rows = 0.0

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        kind = "decode"
        if planned.plan.prompt_tokens and planned.plan.decodes:
            kind = "mixed"
        elif planned.plan.prompt_tokens:
            kind = "prefill"
        seconds = fmean([times.computed - times.started for times in stages])
        self._seconds[kind] += seconds
        if kind == "decode":
            self._decode_rows += planned.plan.decodes * seconds

    def on_beside(self, planned: Planned, times: Beside) -> None:
        """The layout changes. Swaps run beside the steps; where a step waits for one, that is other
        time."""
        if isinstance(times, ReshardTimes):
            self._seconds["transition"] += times.ended - times.began
            self._phases = self.phases(times.began)
            self._phase = times.ended, times.layout

    @property
    def decodes(self) -> float:
        """Answers of a step without prompts, averaged over the time of these steps."""
        if not self._seconds["decode"]:
            return 0.0
        return self._decode_rows / self._seconds["decode"]

    def breakdown(self, end: float) -> Breakdown:
        """Where the time until ``end`` went."""
        return Breakdown(**self._seconds, other=max(0.0, end - sum(self._seconds.values())))

    def phases(self, end: float) -> tuple[tuple[float, float, int], ...]:
        """(begin, end, layout) of each phase, the last one until then."""
        begin, layout = self._phase
        return self._phases + ((begin, end, layout),)
