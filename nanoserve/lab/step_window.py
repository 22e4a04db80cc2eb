"""StepWindow: some consecutive steps from the middle of a run of unknown length, and how they are
drawn."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Self

from nanoserve.lab.charts import ChartCurve, Gantt, GanttSpan, Panel
from nanoserve.record.events import Planned, StepObserver
from nanoserve.record.times import StageTimes

# one more is kept for each stage, because the steps at both ends are not in all stages at once
WINDOW_STEPS = 20


class WindowStep(NamedTuple):
    """One step, and from when to when each stage computes it."""

    step: int
    decodes: int
    prompt_tokens: int
    spans: tuple[tuple[float, float], ...]
    time: float  # when it was planned

    @classmethod
    def of(cls, planned: Planned, stages: Sequence[StageTimes], began: float = 0.0) -> Self:
        """With times from that moment on."""
        plan, spans = (
            planned.plan,
            tuple([(times.started - began, times.computed - began) for times in stages]),
        )
        return cls(plan.step, plan.decodes, plan.prompt_tokens, spans, planned.time - began)


class StepWindow(StepObserver):
    """Keeps the last few of many windows, each beginning at twice the time of the one before.

    So the last but one that is full begins between a quarter and a half of the way through, unless
    the run is short.

    ``began`` becomes moment 0. Where there is a window of another run ``beside`` it, this one has
    the same span, and all steps that were under way in it.
    """

    def __init__(self, began: float = 0.0, beside: "StepWindow | None" = None) -> None:
        self._began = began
        self._beside: tuple[float, float] | None = None
        self._length = WINDOW_STEPS
        self._next_begin = 0.0
        self._windows: deque[list[WindowStep]] = deque(maxlen=3)
        if beside is not None:
            self._beside = beside.span
            self._windows.append([])

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        now = planned.time - self._began
        if self._beside is not None:
            begin, end = self._beside
            shown = now < end and stages[-1].computed - self._began > begin
        else:
            if not self._windows or (now >= self._next_begin and self._is_full(self._windows[-1])):
                self._length = WINDOW_STEPS + len(stages)
                self._windows.append([])
                self._next_begin = 2 * now
            shown = not self._is_full(self._windows[-1])
        if shown:
            self._windows[-1].append(WindowStep.of(planned, stages, self._began))

    def _is_full(self, window: Sequence[WindowStep]) -> bool:
        return len(window) == self._length

    @property
    def steps(self) -> Sequence[WindowStep]:
        """The window to look at: the last but one that is full, or the first."""
        full = [window for window in self._windows if self._is_full(window)]
        if len(full) > 1:
            return full[-2]
        return self._windows[0]

    @property
    def span(self) -> tuple[float, float]:
        """Times between which the window shows everything that the stages did."""
        if self._beside is not None:
            return self._beside
        first, last = self.steps[0], self.steps[-1]
        if self._is_full(self.steps) and first.spans[-1][0] < last.spans[0][1]:
            return first.spans[-1][0], last.spans[0][1]
        return first.spans[0][0], last.spans[-1][1]

    def gantt(self, title: str) -> Gantt:
        """Which step is in which stage; the height of a step is divided between its prompt tokens
        and its decodes."""
        start, end = self.span
        unit, per_second = "s", 1.0
        if end - start < 1:
            unit, per_second = "ms", 1e3
        spans = []
        for step in self.steps:
            # a step without any lets the host go on
            if tokens := step.decodes + step.prompt_tokens:
                parts = {
                    "prompt tokens": step.prompt_tokens / tokens,
                    "decodes": step.decodes / tokens,
                }
                for stage, moments in enumerate(step.spans):
                    left, right = ((moment - start) * per_second for moment in moments)
                    spans.append(GanttSpan(stage, left, right, parts, str(step.step)))
        # layouts differ in their stages
        stages = max((len(step.spans) for step in self.steps), default=1)
        rows = [f"stage {stage}" for stage in range(stages)]
        x = f"time from {start:,.1f} s on, {unit}"
        return Gantt(title=title, x=x, rows=rows, spans=spans, end=(end - start) * per_second)


def token_panels(
    titles: Sequence[str], x: str, counts: Sequence[Sequence[Sequence[int]]]
) -> list[Panel]:
    """Prompt tokens stacked on decodes of each step, a panel for each run, all with the same
    vertical axis.

    The counts of each run are number, decodes and prompt tokens of each step; ``x`` names the
    horizontal axis.
    """
    most = max(decodes + prompt for run in counts for _, decodes, prompt in run)
    panels = []
    for title, run in zip(titles, counts, strict=True):
        steps, decodes, prompts = zip(*run, strict=True)
        curves = [
            ChartCurve("decodes", steps, decodes),
            ChartCurve("prompt tokens", steps, prompts),
        ]
        y = "tokens of a step"
        panels.append(Panel(title=title, x=x, y=y, curves=curves, kind="area", top=1.05 * most))
    return panels
