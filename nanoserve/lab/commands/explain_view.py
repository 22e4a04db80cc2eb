"""Steps of a run as text: all of them one below the other, or one at a time on a terminal; runs are
side by side."""

import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from itertools import groupby

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from nanoserve.commands.terminal import visible
from nanoserve.lab.explanation import (
    AT_MOST,
    ExplainedAnswer,
    ExplainedRow,
    ExplainedRun,
    ExplainedStep,
    Explanation,
)
from nanoserve.record.events import HeldBlocks, States
from nanoserve.scheduler.optional import NO_STATE, StateRow

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_HELP = "left, right: step · home, end · up, down: scroll · q: leave · *shared +copied"
_MOVES = {
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
    "home": (-(2**30), 0),
    "end": (2**30, 0),
}


def print_steps(explanation: Explanation) -> None:
    """All steps, one below the other."""
    console = Console(file=sys.stdout, highlight=False)
    console.print(visible(explanation.title), markup=False)
    for number in range(_length(explanation)):
        console.print(_side_by_side(explanation, number))


def show_steps(explanation: Explanation) -> None:
    """One step at a time on the whole terminal, until q is pressed."""
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.layout import FormattedTextControl, Layout, Window

    step = line = 0
    keys = KeyBindings()

    def shown() -> ANSI:
        output, width = StringIO(), application.output.get_size().columns
        console = Console(
            file=output, width=width, force_terminal=True, color_system="standard", highlight=False
        )
        console.print(_side_by_side(explanation, step))
        lines = output.getvalue().splitlines()[line:]
        head = [visible(explanation.title)[:width], f"\x1b[2m{_HELP}\x1b[0m", ""]
        return ANSI("\n".join(head + lines))

    def move(event: KeyPressEvent) -> None:
        nonlocal step, line
        steps, lines = _MOVES[event.key_sequence[0].key]
        step = min(max(0, step + steps), max(0, _length(explanation) - 1))
        line = max(0, line + lines)
        if lines == 0:
            line = 0

    for key in _MOVES:
        keys.add(key)(move)
    for key in ("q", "c-c"):
        keys.add(key)(lambda event: event.app.exit())
    layout = Layout(Window(FormattedTextControl(shown)))
    application: Application[None] = Application(layout, key_bindings=keys, full_screen=True)
    application.run()


def _length(explanation: Explanation) -> int:
    return max((len(run.steps) for run in explanation.runs), default=0)


def _side_by_side(explanation: Explanation, number: int) -> Table:
    """The step of that number in every run that has it."""
    grid = Table.grid(padding=(0, 2), expand=True)
    cells: list[Group | str] = []
    for run in explanation.runs:
        grid.add_column(ratio=1)
        cells.append("")
        if number < len(run.steps):
            cells[-1] = _step(run, run.steps[number])
    grid.add_row(*cells)
    return grid


def _step(run: ExplainedRun, step: ExplainedStep) -> Group:
    times = f"{step.began:.3f} s"
    if step.ended is not None:
        times = f"{step.began:.3f}-{step.ended:.3f} s"
    title = Text(
        visible(f"{run.policy}: step {step.step} ({len(run.steps)} in all), {times}"), "bold"
    )
    load = ", ".join(f"{name} {one}" for name, one in step.load.items() if one)
    decision = ", ".join(_decided(name, one) for name, one in step.decision.items() if one)
    where = ""
    if step.transition is not None:
        where = f"change from layout {step.layout} to {step.transition}"
    elif (step.layout, step.strategy) != (0, "device"):
        where = f"{step.strategy} in layout {step.layout}"
    host = ""
    if step.total_host:
        host = f", {step.free_host} of {step.total_host} on the host"
    lines: list[tuple[str, str, int | None]] = [("saw", load, None), ("decided", decision, None)]
    lines += [("because", step.bound, None), ("runs", where, None)]
    lines += [("ended", f"{sequence}", sequence) for sequence in step.ended_sequences]
    lines += [
        ("swap", f"{one.sequence}: {one.blocks} blocks {one.direction}", one.sequence)
        for one in step.swaps
    ]
    lines += [("copy", f"block {copy.source} to {copy.target}", None) for copy in step.copies]
    lines += [(row.kind, _row(row), row.sequence) for row in step.rows]
    lines += [("state", _state_row(row), row.sequence) for row in step.state_rows]
    lines += [("blocks", _blocks(table, step), table.sequence) for table in step.tables]
    lines += [("free", f"{step.free_blocks} of {step.total_blocks} blocks{host}", None)]
    lines += [("states", _states(step.states), None)]
    lines += [
        ("canvas" if one.is_canvas else "answer", _answer(one), one.sequence)
        for one in step.answers
    ]
    grid = Table.grid(padding=(0, 1))
    for name, content, sequence in lines:
        if content:
            color = ""
            if sequence is not None:
                color = _COLORS[sequence % len(_COLORS)]
            # a file or a policy wrote it
            grid.add_row(Text(name, "dim"), Text(visible(content), color))
    return Group(title, grid, "")


def _decided(name: str, value: object) -> str:
    if name in AT_MOST:
        return f"at most {value} {name}"
    return f"{name} {value}"


def _quoted(texts: tuple[str, ...]) -> str:
    return " ".join(repr(one) for one in texts if one)


def _row(row: ExplainedRow) -> str:
    place = "goes on"
    if row.count == 1:
        place = f"position {row.start}"
    elif row.count > 1:
        place = f"positions {row.start}-{row.start + row.count - 1}"
    text = f"{row.sequence}: {place}"
    if row.tier == "host":
        text += " on the host"
    text += f" {_quoted(row.tokens)}"
    if row.count > len(row.tokens) and any(row.tokens):
        text += " ..."
    text = text.rstrip()
    if row.draft_tokens:
        text += f"; checks {row.draft_tokens} draft tokens"
    elif row.denoising_step:
        text += f"; denoising step {row.denoising_step}"
    elif row.sample:
        text += "; samples a token"
    return text


def _answer(answer: ExplainedAnswer) -> str:
    return f"{answer.sequence}: {_quoted(answer.tokens) or 'a token'}"


def _blocks(table: HeldBlocks, step: ExplainedStep) -> str:
    """Ranges of blocks: 3-5 7* 9+; a star marks shared ones, a plus copies."""
    marks: dict[int, str] = {}
    where = " on the host"
    if table.tier == "device":
        marks = dict.fromkeys(step.shared, "*") | {copy.target: "+" for copy in step.copies}
        where = ""
    spans = " ".join(_spans(table.blocks, marks))
    return f"{table.sequence}: {spans}{where}, {table.tokens} tokens"


def _state_row(row: StateRow) -> str:
    """Where the row finds and leaves the state of its sequence."""
    source = f"from slot {row.source} "
    if row.source == NO_STATE:
        source = ""
    saved = [f", position {position} to slot {slot}" for position, slot in row.saves]
    return f"{row.sequence}: {source}to slot {row.target}{''.join(saved)}"


def _states(states: States | None) -> str:
    if states is None:
        return ""
    working = f"{states.working} of {states.slots} slots are of running sequences"
    return f"{working}, {states.snapshots} are snapshots, {states.free} free"


def _spans(blocks: tuple[int, ...], marks: Mapping[int, str]) -> Iterator[str]:
    def run_and_mark(item: tuple[int, int]) -> tuple[int, str]:
        """Consecutive blocks differ from their places by the same number."""
        place, block = item
        return block - place, marks.get(block, "")

    for (_, mark), members in groupby(enumerate(blocks), run_and_mark):
        span = [block for _, block in members]
        if len(span) == 1:
            yield f"{span[0]}{mark}"
        else:
            yield f"{span[0]}-{span[-1]}{mark}"
