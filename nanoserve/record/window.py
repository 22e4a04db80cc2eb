"""StepWindow: some consecutive steps from the middle of a run of unknown length."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from nanoserve.record.events import Planned, StepObserver
from nanoserve.record.times import StageTimes

WINDOW_STEPS = 20
"""One more is kept for each stage, because the steps at both ends are not in all stages at once."""


class WindowStep(NamedTuple):
    """One step, and from when to when each stage computes it."""

    step: int
    decodes: int
    prompt_tokens: int
    spans: tuple[tuple[float, float], ...]


class StepWindow(StepObserver):
    """Keeps the last few of many windows, each beginning at twice the time of the one before.

    So the last but one that is full begins between a quarter and a half of the way through, unless the run is short.

    Args:
        began: the moment that becomes 0.
    """

    def __init__(self, began: float = 0.0) -> None:
        self._began = began
        self._length = WINDOW_STEPS
        self._next_begin = 0.0
        self._windows: deque[list[WindowStep]] = deque(maxlen=3)

    def on_step(self, planned: Planned, stages: Sequence[StageTimes]) -> None:
        """One more step; it is kept if it lies in a window."""
        now = planned.time - self._began
        if not self._windows or (now >= self._next_begin and self._is_full(self._windows[-1])):
            self._length = WINDOW_STEPS + len(stages)
            self._windows.append([])
            self._next_begin = 2 * now
        if not self._is_full(self._windows[-1]):
            spans = tuple([(times.started - self._began, times.computed - self._began) for times in stages])
            self._windows[-1].append(WindowStep(planned.plan.step, planned.decodes, planned.prompt_tokens, spans))

    def _is_full(self, window: Sequence[WindowStep]) -> bool:
        return len(window) == self._length

    @property
    def steps(self) -> Sequence[WindowStep]:
        """The window to look at: the last but one that is full, or the first."""
        full = [window for window in self._windows if self._is_full(window)]
        return full[-2] if len(full) > 1 else self._windows[0]

    @property
    def span(self) -> tuple[float, float]:
        """Start and end of the time in which the window shows everything that the stages did."""
        first, last = self.steps[0], self.steps[-1]
        if self._is_full(self.steps) and first.spans[-1][0] < last.spans[0][1]:
            return first.spans[-1][0], last.spans[0][1]
        return first.spans[0][0], last.spans[-1][1]
