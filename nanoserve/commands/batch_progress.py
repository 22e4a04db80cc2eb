"""How far an offline batch is: what is counted between its engine's steps, and how that is shown."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from nanoserve.commands.terminal import REDRAW_SECONDS, is_terminal
from nanoserve.layout import ParallelLayout
from nanoserve.record.counters import EngineStatus
from nanoserve.request import SequenceUpdate

_MOVING = -1
"""A phase as its layout's number, or this while an engine changes from one layout to another."""


@dataclass(slots=True)
class Tally:
    """What this run wrote so far."""

    total: int
    """Rows of the file, with those that an earlier run has done."""
    done_before: int
    started: float
    """When, in seconds of the monotonic clock."""
    written: int = 0
    errors: int = 0
    """Rows, and those of them that are errors."""
    tokens: int = 0
    """Tokens of the answers written."""

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    @property
    def left(self) -> int:
        """Rows that are still to be written."""
        return self.total - self.done_before - self.written

    @property
    def rate(self) -> float:
        """Tokens of answers per second."""
        return self.tokens / max(self.seconds, 1e-9)


@dataclass(slots=True)
class Phases:
    """What engines with two layouts do, and how fast, from what is seen between their steps.

    Where there are several engines, a second that one of them spends in a phase counts as its part of a second, so
    rates are those of all engines in that phase.
    """

    layouts: Sequence[ParallelLayout]
    """That of prompts and that of decodes, of all engines together."""
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """In each phase."""
    prompts: int = 0
    prompt_tokens: int = 0
    """Prompts with a known first token, and their tokens."""
    answer_tokens: int = 0
    """Generated, but for these first ones."""
    fullest: float = 0.0
    """The largest share of host memory that was seen in use."""
    _seen: float = 0.0
    _status: EngineStatus | None = None
    _begun: set[tuple[str, int]] = field(default_factory=set)

    def observe(self, now: float, updates: Sequence[SequenceUpdate], status: EngineStatus) -> None:
        """Count what sequences gained until now, and the time since the last call to the phase that was then seen."""
        for update in updates:
            self.answer_tokens += len(update.new_tokens)
            if update.new_tokens and (sample := (update.request_id, update.index)) not in self._begun:
                self._begun.add(sample)
                self.answer_tokens -= 1
                if update.index == 0:  # further samples of a prompt begin with the KV of the first
                    self.prompts += 1
                    self.prompt_tokens += update.sequence.prompt_length - update.sequence.cached_tokens
        self._begun.difference_update((update.request_id, update.index) for update in updates if update.finished)
        for phase in self._phases:
            self.seconds[phase] += (now - self._seen) / len(self._phases)
        self._seen, self._status = now, status
        self.fullest = max(self.fullest, self.pool_share)

    @property
    def pool_share(self) -> float:
        """The share of the blocks in host memory that are in use."""
        if self._status is None or not self._status.total_host_blocks:
            return 0.0
        return 1 - self._status.free_host_blocks / self._status.total_host_blocks

    @property
    def state(self) -> str:
        """Phase, rates, host memory and transitions: what is shown while they run.

        Where engines differ in their phases, it says how many of them are in which.
        """
        counts = Counter(self._phases or [0])
        names = [
            "moving" if phase == _MOVING else f"{('prefill', 'decode')[phase]} {self.layouts[phase].name}"
            for phase in sorted(counts, reverse=True)
        ]
        if len(names) > 1:
            names = [f"{counts[phase]} {name}" for phase, name in zip(sorted(counts, reverse=True), names, strict=True)]
        return f"{', '.join(names)}, host pool {self.pool_share:.0%}, {self._turns}; {self._rates}"

    @property
    def summary(self) -> str:
        """The same, looking back."""
        return f"{self._rates}, host pool at most {self.fullest:.0%}, {self._turns}"

    def seconds_left(self, rows: int, finished: int, tokens: int) -> float | None:
        """Seconds until ``rows`` are done, at the pace so far; None before any is done.

        Args:
            finished: rows that have their answers.
            tokens: of these answers.
        """
        if not finished or not self.prompts:
            return None
        prompts_left = max(0, rows - self.prompts)
        tokens_left = max(0.0, rows * (tokens / finished - 1) - self.answer_tokens)
        if tokens_left and not self.answer_tokens:
            return None
        prefill, decode = self.seconds[0], self.seconds[1]
        seconds = prompts_left * prefill / self.prompts + tokens_left * decode / max(1, self.answer_tokens)
        return seconds * (1 + self.seconds[_MOVING] / max(prefill + decode, 1e-9))

    @property
    def _phases(self) -> list[int]:
        """The phase of each engine."""
        if self._status is None:
            return []
        pairs = zip(self._status.layouts, self._status.changing, strict=True)
        return [_MOVING if changing else layout for layout, changing in pairs]

    @property
    def _rates(self) -> str:
        done = (self.prompt_tokens, self.answer_tokens)
        return ", ".join(
            f"{layout.name} {tokens / self.seconds[phase]:,.0f} tokens/s" if self.seconds[phase] else f"{layout.name} -"
            for phase, (layout, tokens) in enumerate(zip(self.layouts, done, strict=True))
        )

    @property
    def _turns(self) -> str:
        """Transitions of all engines so far."""
        number = 0 if self._status is None else self._status.transitions
        return f"{number} transition" + "s" * (number != 1)


@contextmanager
def progress_bar(tally: Tally, phases: Phases | None = None) -> Iterator[Callable[[], None]]:
    """Draw rows, tokens/s and the time left on stderr, if it is a terminal, and below it what the phases are.

    The thread that runs the engine calls what it yields after every step; most calls draw nothing.
    """
    if not is_terminal(sys.stderr):
        yield lambda: None
        return
    left = TimeRemainingColumn() if phases is None else TextColumn("{task.fields[left]}")
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]} tokens/s, left"), left
    bars = Progress(*columns, auto_refresh=False)
    task = bars.add_task("rows", total=tally.total, completed=tally.total - tally.left, rate="-", left="-")
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        drawn = 0.0

        def draw(*, at_end: bool = False) -> None:
            nonlocal drawn
            if not at_end and time.monotonic() - drawn < REDRAW_SECONDS:
                return
            drawn = time.monotonic()
            done, rate = tally.total - tally.left, f"{tally.rate:,.0f}"
            bars.update(task, completed=done, rate=rate, left=_time_left(tally, phases))
            state = () if phases is None else (Text(phases.state, no_wrap=True, overflow="ellipsis"),)
            live.update(Group(bars, *state), refresh=True)

        yield draw
        draw(at_end=True)  # all rows are done


def _time_left(tally: Tally, phases: Phases | None) -> str:
    rows, finished = tally.total - tally.done_before, tally.written - tally.errors
    seconds = None if phases is None else phases.seconds_left(rows - tally.errors, finished, tally.tokens)
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))
