"""Progress on stderr: bars on a terminal, elsewhere a line now and then. Both say how much time is left."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TypeVar

from rich import progress as bars
from rich.console import Console

from nanoserve.commands.terminal import REDRAW_SECONDS, is_terminal, remark

_LINE_SECONDS = 5.0  # between two lines where there is no terminal: what takes no longer is silent
_LINE_SHARE = 0.1  # of the time passed lies between two lines: long runs have no more lines than they need

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and how much there is."""
T = TypeVar("T")


@dataclass(slots=True)
class _Stage:
    began: float
    first: int  # how far it was then
    shown: float  # when it was last shown

    def left(self, now: float, done: int, total: int) -> str:
        """The time to the end, at the pace since the beginning; a dash before there is one."""
        if done <= self.first:
            return "-"
        return str(timedelta(seconds=round((now - self.began) * (total - done) / (done - self.first))))


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield a function that shows how far each stage is; most calls show nothing. A thread would disturb the work."""
    stages: dict[str, _Stage] = {}
    if not is_terminal(sys.stderr):
        yield partial(_say, stages)
        return
    tasks: dict[str, bars.TaskID] = {}
    left_column = bars.TextColumn("{task.fields[left]}")
    columns = bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn(), left_column
    with bars.Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as shown:

        def draw(what: str, done: int, total: int) -> None:
            now = time.monotonic()
            if what not in tasks:
                stages[what] = _Stage(now, done, 0.0)
                tasks[what] = shown.add_task(what, total=total, left="")
            stage, is_over = stages[what], done >= total
            left = "" if is_over else f"{stage.left(now, done, total)} left"
            shown.update(tasks[what], completed=done, total=total, left=left, visible=not is_over)
            if is_over or now - stage.shown > REDRAW_SECONDS:
                stage.shown = now
                shown.refresh()

        yield draw


def _say(stages: dict[str, _Stage], what: str, done: int, total: int) -> None:
    now = time.monotonic()
    stage = stages.setdefault(what, _Stage(now, done, now))
    if done < total and now - stage.shown >= max(_LINE_SECONDS, _LINE_SHARE * (now - stage.began)):
        stage.shown = now
        remark(f"{what}: {done / total:.0%}, about {stage.left(now, done, total)} left")


def counted(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """A function to call whenever one of ``total`` is done."""
    progress(what, 0, total)
    numbers = count(1)
    return lambda: progress(what, next(numbers), total)


def watched(items: Collection[T], what: str) -> Iterator[T]:
    """The items, while it is shown how many of them are done."""
    with show_progress() as progress:
        one_is_done = counted(progress, what, len(items))
        for item in items:
            yield item
            one_is_done()
