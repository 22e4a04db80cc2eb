"""Steps of a run as text: all of them one below the other, or one at a time on a terminal; runs are side by side."""

import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nanoserve.record.explanation import ExplainedRow, ExplainedRun, ExplainedStep, ExplainedTable, Explanation

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_HELP = "left, right: one step · home, end · up, down: scroll · q: leave · * shared block, + just copied"


def print_steps(explanation: Explanation) -> None:
    """All steps, one below the other."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=len(explanation.runs) == 1)
    console.print(explanation.title, markup=False)
    for number in range(_length(explanation)):
        console.print(_side_by_side(explanation, number))


def show_steps(explanation: Explanation) -> None:
    """One step at a time on the whole terminal, until q is pressed."""
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import FormattedTextControl, Layout, Window

    last, keys = max(0, _length(explanation) - 1), KeyBindings()
    step = line = 0

    def shown() -> ANSI:
        output = StringIO()
        width = application.output.get_size().columns
        console = Console(file=output, width=width, force_terminal=True, color_system="standard", highlight=False)
        console.print(_side_by_side(explanation, step))
        heading = f"{explanation.title}\n\x1b[2m{_HELP}\x1b[0m\n\n"
        return ANSI(heading + "".join(output.getvalue().splitlines(keepends=True)[line:]))

    def bind(key: str, steps: int, lines: int = 0) -> None:
        @keys.add(key)
        def _(_event: object) -> None:
            nonlocal step, line
            step, line = min(max(0, step + steps), last), max(0, line + lines) if lines else 0

    for key, steps, lines in (("left", -1, 0), ("right", 1, 0), ("up", 0, -1), ("down", 0, 1)):
        bind(key, steps, lines)
    bind("home", -last)
    bind("end", last)
    for key in ("q", "escape", "c-c"):
        keys.add(key)(lambda event: event.app.exit())
    window = Window(FormattedTextControl(shown))
    application: Application[None] = Application(Layout(window), key_bindings=keys, full_screen=True)
    application.run()


def _length(explanation: Explanation) -> int:
    return max((len(run.steps) for run in explanation.runs), default=0)


def _side_by_side(explanation: Explanation, number: int) -> Table:
    """The step of that number in every run that has so many."""
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in explanation.runs:
        grid.add_column(ratio=1)
    runs = explanation.runs
    grid.add_row(*(_step(run, run.steps[number]) if number < len(run.steps) else Text() for run in runs))
    return grid


def _step(run: ExplainedRun, step: ExplainedStep) -> Text:
    text = Text()
    times = f"{step.began:.3f} s" if step.ended is None else f"{step.began:.3f}-{step.ended:.3f} s"
    text.append(f"{run.policy}: step {step.step} ({len(run.steps)} in all), {times}\n", "bold")
    changed = "" if step.transition is None else f"change to layout {step.transition}"
    where = "" if (step.layout, step.strategy) == (0, "device") else f"{step.strategy} in layout {step.layout}"
    host = f", {step.free_host} of {step.total_host} on the host" if step.total_host else ""
    parts = [
        ("saw", _listed(step.load)),
        ("decided", _listed(step.decision)),
        ("because", step.bound),
        ("runs", where or changed),
        ("ended", " ".join(map(str, step.ended_sequences))),
        *(("swap", f"sequence {one.sequence}, {one.blocks} blocks {one.direction}") for one in step.swaps),
    ]
    for name, content in parts:
        if content:
            text.append(f"{name:8}", "dim").append(f"{content}\n")
    for row in step.rows:
        text.append(f"{row.kind:8}", "dim").append_text(_row(row)).append("\n")
    for table in step.tables:
        text.append(f"{'blocks':8}", "dim").append_text(_table(table, step)).append("\n")
    text.append(f"{'free':8}", "dim").append(f"{step.free_blocks} of {step.total_blocks} blocks{host}\n")
    for answer in step.answers:
        texts = " ".join(repr(one) for one in answer.tokens if one) or "a token"
        text.append(f"{'answer':8}", "dim").append(f"{answer.sequence}: {texts}\n", _color(answer.sequence))
    return text


def _row(row: ExplainedRow) -> Text:
    last = row.start + row.count - 1
    place = f"position {row.start}" if row.count == 1 else f"positions {row.start}-{last}" if row.count else "goes on"
    texts = " ".join(repr(one) for one in row.tokens if one)
    more = " ..." if texts and row.count > len(row.tokens) else ""
    sampled = ", sampled" if row.sample else ""
    host = " on the host" if row.tier == "host" else ""
    return Text(f"{row.sequence}: {place}{host}{sampled} {texts}{more}".rstrip(), _color(row.sequence))


def _table(table: ExplainedTable, step: ExplainedStep) -> Text:
    """Ranges of blocks: 3-5 7* 9+; a star marks shared ones, a plus copies."""
    copied = {target for _, target in step.copies} if table.tier == "device" else set()
    marks = {block: "*" for block in step.shared if table.tier == "device"} | dict.fromkeys(copied, "+")
    spans = " ".join(_spans(table.blocks, marks))
    host = " on the host" if table.tier == "host" else ""
    return Text(f"{table.sequence}: {spans}{host}, {table.tokens} tokens", _color(table.sequence))


def _spans(blocks: tuple[int, ...], marks: Mapping[int, str]) -> Iterator[str]:
    for (_, mark), members in groupby(enumerate(blocks), lambda item: (item[1] - item[0], marks.get(item[1], ""))):
        span = [block for _, block in members]
        yield (str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}") + mark


def _color(sequence: int) -> str:
    return _COLORS[sequence % len(_COLORS)]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value)
