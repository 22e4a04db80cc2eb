"""Progress on stderr: bars on a terminal, elsewhere a line now and then. Both say how much time is
left."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from nanoserve.commands.terminal import REDRAW_SECONDS, is_terminal, remark
from nanoserve.models.hub_files import CHECKING, DOWNLOADING
from nanoserve.utils.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress as Drawn
    from rich.progress import TaskID

_LINE_SECONDS = 5.0  # between two lines where there is no terminal: what takes no longer is silent
# of the time passed lies between two lines: long runs have no more lines than they need
_LINE_SHARE = 0.1
_IN_BYTES = (DOWNLOADING, CHECKING)
"""Stages that also show how many bytes there are, and how many a second."""

# called with a stage's name, how much of it is done, and how much there is
Progress = Callable[[str, int, int], None]
T = TypeVar("T")


@dataclass(slots=True)
class _Stage:
    began: float
    first: int  # how far it was then
    shown: float  # when it was last shown


class _Bars(ExitStack):
    """Bars on a terminal, one for each stage. They are drawn, and rich is imported, when the first
    stage begins: most commands find their model at once."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: Drawn | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, what: str, done: int, total: int, left: str) -> None:
        if self._drawn is None:
            self._drawn = self.enter_context(self._make())
        if what not in self._tasks:
            self._tasks[what] = self._drawn.add_task(what, left="")
        self._drawn.update(
            self._tasks[what], completed=done, total=total, left=left, visible=done < total
        )

    def refresh(self) -> None:
        if self._drawn is not None:
            self._drawn.refresh()

    @staticmethod
    def _make() -> "Drawn":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[left]}"),
        )
        console = Console(stderr=True)
        console.width -= 3  # room for the ^C that a terminal writes: the line must not wrap
        return Progress(*columns, console=console, auto_refresh=False, transient=True)


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Yield a function that shows how far each stage is; most calls show nothing. A thread would
    disturb the work."""
    is_watched, stages, bars = is_terminal(sys.stderr), dict[str, _Stage](), _Bars()

    def show(what: str, done: int, total: int) -> None:
        now, is_over = time.monotonic(), done >= total
        if what not in stages:
            shown = 0.0 if is_watched else now
            stages[what] = _Stage(now, done, shown)
        stage, left = stages[what], "-"
        if done > stage.first:  # at the pace since the beginning
            seconds = (now - stage.began) * (total - done) / (done - stage.first)
            left = str(timedelta(seconds=round(seconds)))
        amount = ""
        if what in _IN_BYTES and now > stage.began:
            rate = format_size(round((done - stage.first) / (now - stage.began)))
            amount = f"{format_size(done)} of {format_size(total)}, {rate}/s, "
        if is_watched:
            column = "" if is_over else f"{amount}{left} left"
            bars.update(what, done, total, column)
            if is_over or now - stage.shown > REDRAW_SECONDS:
                stage.shown = now
                bars.refresh()
        elif not is_over and now - stage.shown >= max(
            _LINE_SECONDS, _LINE_SHARE * (now - stage.began)
        ):
            stage.shown = now
            remark(f"{what}: {done / total:.0%}, {amount}about {left} left")

    with bars:
        yield show


def counted(progress: Progress, what: str, total: int) -> Callable[[], None]:
    """A function to call whenever one of ``total`` is done."""
    progress(what, 0, total)
    numbers = count(1)
    return lambda: progress(what, next(numbers), total)


def watched(items: Collection[T], what: str) -> Iterator[T]:
    with show_progress() as progress:
        one_is_done = counted(progress, what, len(items))
        for item in items:
            yield item
            one_is_done()
