"""StepWindow: some consecutive steps from the midst of a run, however long it will be."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from nanoserve.costs.work import StepWork
from nanoserve.scheduler.plan import StepPlan
from nanoserve.simulator.pipeline import Passage

WINDOW_STEPS = 20
"""And one more for each stage, for the steps at both ends are not seen in all stages at once."""


class WindowStep(NamedTuple):
    """One step and its passage through each stage."""

    step: int
    decodes: int
    prompt_tokens: int
    passages: tuple[Passage, ...]


class StepWindow:
    """A StepObserver that keeps the last few of many windows, each beginning at twice the time of the one before.

    The last but one that is full thus begins between a quarter and a half of the way through, unless the run is short.
    """

    def __init__(self) -> None:
        self._length = WINDOW_STEPS
        self._next_begin = 0.0
        self._windows: deque[list[WindowStep]] = deque(maxlen=3)

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """One more step; it is kept if it lies in a window."""
        if not self._windows or (now >= self._next_begin and self._is_full(self._windows[-1])):
            self._length = WINDOW_STEPS + len(passages)
            self._windows.append([])
            self._next_begin = 2 * now
        if not self._is_full(self._windows[-1]):
            step = WindowStep(plan.step, work.decodes, work.tokens - work.decodes, tuple(passages))
            self._windows[-1].append(step)

    def _is_full(self, window: Sequence[WindowStep]) -> bool:
        return len(window) == self._length

    @property
    def steps(self) -> Sequence[WindowStep]:
        """The window to look at: the last but one that is full, or the first."""
        full = [window for window in self._windows if self._is_full(window)]
        return full[-2] if len(full) > 1 else self._windows[0]

    @property
    def span(self) -> tuple[float, float]:
        """From when to when the window shows all that every stage did."""
        first, last = self.steps[0], self.steps[-1]
        if self._is_full(self.steps) and first.passages[-1].start < last.passages[0].end:
            return first.passages[-1].start, last.passages[0].end
        return first.passages[0].start, last.passages[-1].end
