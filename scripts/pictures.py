"""The pictures of the README, made from real runs: a chat on a terminal, and the schedules of two
policies.

    python scripts/pictures.py

The chat is played back as fast as it came; only the typing is made up. The files are in
docs/pictures.
"""

import codecs
import math
import os
import pty
import re
import select
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from nanoserve.lab.charts import Chart, draw
from nanoserve.lab.commands.simulate import SimulatedHardware, SimulateOptions
from nanoserve.lab.simulator import simulate
from nanoserve.lab.step_window import StepWindow
from nanoserve.scheduler.policies import parse_policies

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
COMMAND = "nanoserve chat --seed 9"
QUESTION = "tell me a story about a fox and a boat"
COLUMNS = 80
FRAME_SECONDS, END_SECONDS = 0.05, 6.0
CELL, LINE, MARGIN = 8.4, 19, 16  # pixels
STYLE = """text{font:14px ui-monospace,Menlo,'DejaVu Sans Mono',monospace;fill:#d8dee9}
.dim{fill:#8b95a7}"""
_CODES = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(.)", re.DOTALL)

Cells = dict[tuple[int, int], tuple[str, str]]  # characters and their styles, by row and column
# what the screen showed, and how many seconds after the command was entered
Frame = tuple[float, Cells]
# row, column, text, style, begin and end in seconds
Piece = tuple[int, int, str, str, float, float]


class Screen:
    """A terminal that understands what rich and prompt_toolkit write into a chat."""

    def __init__(self) -> None:
        self.cells: Cells = {}
        self.row, self.column, self.style = 0, 0, ""

    def write(self, text: str) -> None:
        for private, number, command, character in _CODES.findall(text):
            if command == "m":
                self.style = "dim" if number == "2" else ""
            elif command in ("A", "C", "D"):
                down, right = {"A": (-1, 0), "C": (0, 1), "D": (0, -1)}[command]
                self.row, self.column = (
                    self.row + down * int(number or 1),
                    self.column + right * int(number or 1),
                )
            elif command in ("J", "K") and not private:
                first, last_row = (
                    0 if number == "2" else self.column,
                    self.row if command == "K" else math.inf,
                )
                self.cells = {
                    at: cell
                    for at, cell in self.cells.items()
                    if at < (self.row, first) or at[0] > last_row
                }
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


def record() -> list[Frame]:
    """A chat: someone reads for a second, types the question, and reads the answer."""
    process, terminal = pty.fork()
    if process == 0:
        termios.tcsetwinsize(0, (50, COLUMNS))
        settings = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "NANOSERVE_NO_HISTORY": "1"}
        os.execve(sys.executable, [sys.executable, "-m", *COMMAND.split()], os.environ | settings)
    decode, began, screen = (
        codecs.getincrementaldecoder("utf-8")().decode,
        time.monotonic(),
        Screen(),
    )
    screen.write(f"$ {COMMAND}\r\n")
    frames = [(0.0, dict(screen.cells))]
    keys = ["\r", *reversed(QUESTION), *[""] * 20]  # from the last to the first, one for each frame
    while screen.prompts < 2:
        end = time.monotonic() + FRAME_SECONDS
        while (left := end - time.monotonic()) > 0:
            if select.select([terminal], [], [], left)[0]:
                screen.write(decode(os.read(terminal, 1 << 16)))
        frames.append((time.monotonic() - began, dict(screen.cells)))
        if screen.prompts and keys:
            os.write(terminal, keys.pop().encode())
    os.close(terminal)  # hangs up
    os.waitpid(process, 0)
    return frames


def pieces(frames: Sequence[Frame]) -> Iterator[Piece]:
    """Neighbours of one style that come and go together."""
    found: list[tuple[int, float, float, str, int, str]] = []
    shown: dict[tuple[int, int], tuple[tuple[str, str], float]] = {}
    for now, cells in [*frames, (math.inf, {})]:
        for row, column in [at for at, (cell, _) in shown.items() if cells.get(at) != cell]:
            (character, style), begin = shown.pop((row, column))
            found.append((row, begin, now, style, column, character))
        shown |= {at: (cell, now) for at, cell in cells.items() if at not in shown}
    for (*place, _), group in groupby(
        enumerate(sorted(found)), lambda pair: (*pair[1][:4], pair[1][4] - pair[0])
    ):
        row, begin, end, style = place
        columns, characters = zip(*[cell[4:] for _, cell in group], strict=True)
        text = "".join(characters)
        if text.strip():
            yield row, columns[0] + len(text) - len(text.lstrip()), text.strip(), style, begin, end


def animation(frames: Sequence[Frame]) -> str:
    """An SVG that plays the frames again and again. Programs that do not animate show the last
    one."""
    seconds = frames[-1][0] + END_SECONDS
    width, height = (
        cells * size + 2 * MARGIN
        for cells, size in ((COLUMNS, CELL), (max(frames[-1][1])[0] + 1, LINE))
    )
    drawn = [
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
    ]
    drawn += [f"<title>{escape(f'{COMMAND}: {QUESTION}')}</title><style>{STYLE}</style>"]
    drawn += [f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#1f2430"/>']
    for row, column, text, style, begin, end in pieces(frames):
        x = MARGIN + column * CELL
        y = MARGIN + (row + 0.75) * LINE
        place = f'x="{x:g}" y="{y:g}" textLength="{len(text) * CELL:g}"'
        stays = end == math.inf
        times = ";".join(
            f"{moment / seconds:.4f}" for moment in (0, begin, end) if moment <= seconds
        )
        values = "0;1" if stays else "0;1;0"
        timing = f'values="{values}" keyTimes="{times}" calcMode="discrete" dur="{seconds:.2f}s"'
        motion = (
            f'<animate attributeName="opacity" {timing} repeatCount="indefinite"/>' if begin else ""
        )
        look = f'class="{style}"' + ("" if stays else ' opacity="0"')
        drawn.append(f"<text {place} {look}>{escape(text)}{motion}</text>")
    return "\n".join([*drawn, "</svg>\n"])


def schedules() -> Chart:
    """`nanoserve simulate --policy sarathi,throttling --rate 3 --requests 200`: the same second
    under both policies."""
    options = SimulateOptions(policy="sarathi,throttling", rate=3.0, requests=200)
    hardware = SimulatedHardware.of(options, options.max_num_batched_tokens, options.max_num_seqs)
    window, panels, blocks, times = None, [], hardware.kv_blocks[0], hardware.predictors
    for name, policy in parse_policies(options.policy, options.max_num_batched_tokens).items():
        window = StepWindow(beside=window)
        result = simulate(
            policy,
            hardware.layouts[0],
            options.workload(),
            num_blocks=blocks,
            max_num_seqs=hardware.max_num_seqs,
            observers=(window,),
            predictors=times,
        )
        gaps = result.itl_ms and f", p99 gap between tokens {result.itl_ms.p99:,.0f} ms"
        panels.append(window.gantt(f"{name}: {result.bubble_share:.0%} idle{gaps}"))
    return Chart(f"{options.model} in {options.pp} pipeline stages, simulated", panels, columns=2)


if __name__ == "__main__":
    (PICTURES / "chat.svg").write_text(animation(record()), encoding="utf-8")
    draw(schedules(), PICTURES / "schedule.png", panel_size=(4.6, 2.2))
