"""The pictures of the README, made from real runs: a chat on a terminal, and the schedules of two policies.

    python scripts/pictures.py

The chat is played back as fast as it came; only the typing is made up. The files are in docs/pictures.
"""

import codecs
import os
import pty
import re
import select
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from nanoserve.benchmarks.policy_names import parse_policies
from nanoserve.commands.simulate import SimulatedHardware, SimulateOptions
from nanoserve.measures.charts import Chart, draw
from nanoserve.record.window import StepWindow
from nanoserve.simulator import simulate

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
COMMAND = "nanoserve chat --seed 9"
QUESTION = "tell me a story about a fox and a boat"
COLUMNS = 80
KEY_SECONDS, PAUSE_SECONDS, END_SECONDS, FRAME_SECONDS = 0.06, 1.0, 6.0, 0.04
CELL, LINE, MARGIN = 8.4, 19, 16  # pixels
STYLE = """text{font:14px ui-monospace,Menlo,'DejaVu Sans Mono',monospace;fill:#d8dee9;white-space:pre}
.dim{fill:#8b95a7}"""
_CODES = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(.)", re.DOTALL)

Cells = dict[tuple[int, int], tuple[str, str]]  # characters and their styles, by row and column
Piece = tuple[int, int, str, str, float, float | None]  # row, column, text, style, begin and end in seconds


class Screen:
    """A terminal that understands what rich and prompt_toolkit write into a chat."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self.row, self.column, self.style = 0, 0, ""

    def write(self, text: str) -> None:
        for private, number, command, character in _CODES.findall(text):
            if command == "m":
                self.style = "dim" if number == "2" else ""
            elif command in ("C", "D"):
                self.column += int(number or 1) * (1 if command == "C" else -1)
            elif command == "A":
                self.row -= int(number or 1)
            elif command in ("J", "K") and not private:
                first, last_row = 0 if number == "2" else self.column, self.row if command == "K" else float("inf")
                for row, column in list(self.cells):
                    if (self.row < row <= last_row) or (row == self.row and column >= first):
                        del self.cells[row, column]
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
            elif character:
                self.cells[self.row, self.column] = (character, self.style)
                self.column += 1

    @property
    def prompts(self) -> int:
        return sum(self.cells.get((row, 2)) == (">", "") for row in range(self.row + 1))


class Recording:
    """A command on a pseudo-terminal, and what its screen showed: frames with seconds since it was entered."""

    def __init__(self, command: str) -> None:
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            termios.tcsetwinsize(0, (50, COLUMNS))
            settings = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "COLUMNS": str(COLUMNS)}
            os.execve(sys.executable, [sys.executable, "-m", *command.split()], os.environ | settings)
        self.screen, self.began = Screen(), time.monotonic()
        self.screen.write(f"$ {command}\r\n")
        self.frames: list[tuple[float, Cells]] = [(0.0, dict(self.screen.cells))]
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def watch(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            end = time.monotonic() + FRAME_SECONDS
            while (left := end - time.monotonic()) > 0:
                if select.select([self.terminal], [], [], left)[0]:
                    self.screen.write(self._decoder.decode(os.read(self.terminal, 1 << 16)))
            self.frames.append((time.monotonic() - self.began, dict(self.screen.cells)))

    def type(self, keys: str, pause: float) -> None:
        for key in keys:
            os.write(self.terminal, key.encode())
            end = time.monotonic() + pause
            self.watch(lambda end=end: time.monotonic() >= end)

    def close(self) -> None:
        os.write(self.terminal, b"\x04")
        while select.select([self.terminal], [], [], PAUSE_SECONDS)[0]:
            try:
                os.read(self.terminal, 1 << 16)
            except OSError:  # Linux tells by an error that the other end is closed
                break
        os.waitpid(self.process, 0)
        os.close(self.terminal)


def pieces(frames: Sequence[tuple[float, Cells]]) -> Iterator[Piece]:
    """Neighbours of one style that come and go together."""
    found = []
    shown: dict[tuple[int, int], tuple[tuple[str, str], float]] = {}
    for now, cells in [*frames, (None, {})]:
        for at in [at for at, (cell, _) in shown.items() if cells.get(at) != cell]:
            (character, style), begin = shown.pop(at)
            found.append((at[0], begin, now, style, at[1], character))
        shown |= {at: (cell, now) for at, cell in cells.items() if at not in shown}
    found.sort(key=lambda one: (one[0], one[1], one[2] or float("inf"), one[3], one[4]))
    numbered = enumerate(found)
    for (row, begin, end, style, _), group in groupby(numbered, lambda pair: (*pair[1][:4], pair[1][4] - pair[0])):
        cells = [cell for _, cell in group]
        text = "".join(cell[5] for cell in cells).rstrip()
        if text:
            yield row, cells[0][4], text, style, begin, end


def animation(frames: Sequence[tuple[float, Cells]], title: str) -> str:
    """An SVG that plays the frames again and again. Programs that do not animate show the last one."""
    seconds = frames[-1][0] + END_SECONDS
    rows = 1 + max(row for row, _ in frames[-1][1])
    width, height = COLUMNS * CELL + 2 * MARGIN, rows * LINE + 2 * MARGIN
    texts = []
    for row, column, text, style, begin, end in pieces(frames):
        place = f'x="{MARGIN + column * CELL:g}" y="{MARGIN + (row + 0.75) * LINE:g}" textLength="{len(text) * CELL:g}"'
        values = "0;1" if end is None else "0;1;0"
        times = ";".join(f"{moment / seconds:.4f}" for moment in (0, begin, end) if moment is not None)
        timing = f'values="{values}" keyTimes="{times}" calcMode="discrete" dur="{seconds:.2f}s"'
        motion = f'<animate attributeName="opacity" {timing} repeatCount="indefinite"/>' if begin else ""
        look = (f' class="{style}"' if style else "") + ("" if end is None else ' opacity="0"')
        texts.append(f"<text {place}{look}>{escape(text)}{motion}</text>")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#1f2430"/>',
            *texts,
            "</svg>\n",
        ]
    )


def chat() -> str:
    """A person who waits a moment, types a question, and reads."""
    recording = Recording(COMMAND)
    recording.watch(lambda: recording.screen.prompts == 1)
    recording.type("", 0)
    recording.type(QUESTION, KEY_SECONDS)
    recording.type("\r", KEY_SECONDS)
    recording.watch(lambda: recording.screen.prompts == 2)
    recording.close()
    return animation(recording.frames, f"{COMMAND}: {QUESTION}")


def schedules() -> Chart:
    """`nanoserve simulate --policy sarathi,throttling --rate 3 --requests 200`: the same second under both policies."""
    options = SimulateOptions(policy="sarathi,throttling", rate=3.0, requests=200)
    hardware = SimulatedHardware.of(options, options.max_num_batched_tokens)
    window, panels = None, []
    for name, policy in parse_policies(options.policy, options.max_num_batched_tokens).items():
        window = StepWindow(beside=window)
        result = simulate(
            policy,
            hardware.layouts[0],
            options.workload(),
            num_blocks=hardware.kv_blocks[0],
            observers=(window,),
            predictors=hardware.predictors,
        )
        gaps = "" if result.itl_ms is None else f", p99 gap between tokens {result.itl_ms.p99:,.0f} ms"
        panels.append(window.gantt(f"{name}: idle for {result.bubble_share:.0%} of the run{gaps}"))
    return Chart(f"{options.model} in {options.pp} pipeline stages, simulated", panels, columns=2)


def main() -> None:
    (PICTURES / "chat.svg").write_text(chat(), encoding="utf-8")
    draw(schedules(), PICTURES / "schedule.png", panel_size=(6, 2.6))


if __name__ == "__main__":
    main()
