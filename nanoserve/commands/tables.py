"""Tables on the terminal, built from the rows of a report."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_OF_A_FILE = 100
_NOTHING = "-"
_TEXT_FORMATS = ("", "<")
_MARKUP = re.compile(r"[\\|*`<]")
FEW_MARK = "*"
_BEYOND = {"p90": 10, "p99": 100}  # values of which one lies beyond that percentile
_FEW_NOTE = f"{FEW_MARK} close to the largest value: p90 takes 10 values, p99 takes 100"
_FRAME = 3  # width around a column: a line, and a space on either side


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, where its value lies in a row ("ttft_ms.p50"), its format; "<" is
    text on the left."""

    heading: str
    path: str
    format: str = ""

    def value(self, row: Mapping[str, Any]) -> Any:
        """The row's value; None where there is none."""
        value: Any = row
        for part in self.path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def text(self, row: Mapping[str, Any], nothing: str = _NOTHING) -> str:
        """The value as it is shown, marked if it is of few values; `nothing` stands where there is
        none."""
        value = self.value(row)
        if value is None:
            return nothing
        text = format(value, self.format)
        if self.is_of_few(row):
            text += FEW_MARK
        return text

    def is_of_few(self, row: Mapping[str, Any]) -> bool:
        """Whether it is a high percentile of so few values that less than one lies beyond: a p99
        takes 100 values."""
        above, dot, name = self.path.rpartition(".")
        if name not in _BEYOND:
            return False
        number = Column("", f"{above}{dot}n").value(row)
        return number is not None and number < _BEYOND[name]


def columns(*formats: tuple[str, *tuple[str | tuple[str, str], ...]]) -> list[Column]:
    """Columns by their format: of each, its heading and the path of its value; a path alone is
    headed by its end."""
    found = []
    for shown, *several in formats:
        for entry in several:
            if isinstance(entry, str):
                heading, path = entry.rpartition(".")[2].replace("_", " "), entry
            else:
                heading, path = entry
            found.append(Column(heading, path, shown))
    return found


def print_table(
    title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, keys: int = 1
) -> None:
    """Print to stdout. A table too wide for the terminal, or for a file's 100 characters, goes on
    in further tables. ``keys`` is the number of leftmost columns that identify a row; each further
    table begins with them, too."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    kept = list(rows)
    texts = [[column.heading] + [column.text(row) for row in kept] for column in columns]
    best = [max(map(cell_len, several)) for several in texts]
    # A column has room for its longest word at least, for a cut number is none. The first one is
    # never wrapped.
    least = [_longest_word(several) for several in texts]
    least[0] = best[0]
    for number, part in enumerate(_parts(least, keys, console.width)):
        # A Text is shown as it is: a model's name may hold what rich would take for markup.
        table = Table(title=None if number else Text(title, style="bold"), title_justify="left")
        for place, width in _widths(part, least, best, console.width).items():
            side: Literal["left", "right"] = (
                "left" if place == 0 or columns[place].format == "<" else "right"
            )
            table.add_column(texts[place][0], justify=side, no_wrap=place == 0, width=width)
        for row in zip(*(texts[place][1:] for place in part), strict=True):
            table.add_row(*row)
        console.print(table)
    if any(column.is_of_few(row) for row in kept for column in columns):
        console.print(_FEW_NOTE)


def _longest_word(texts: Iterable[str]) -> int:
    words = " ".join(texts).split()
    return max(map(cell_len, words), default=1)


def markdown_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table in GitHub's Markdown, numbers on the right. A row that `failed` shows why in its
    second column."""
    lines = [[escaped(column.heading) for column in columns]]
    lines.append(["---" if column.format in _TEXT_FORMATS else "---:" for column in columns])
    for row in rows:
        texts = [column.text(row, nothing="") for column in columns]
        if row.get("failed") is not None:
            texts[1] = row["failed"]
        lines.append([escaped(text) for text in texts])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """The text on one line, with a backslash before what GitHub's Markdown would take for more than
    text."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _parts(least: Sequence[int], keys: int, width: int) -> list[list[int]]:
    """The places of each table's columns, the keys first."""
    parts = [list(range(keys))]
    for place in range(keys, len(least)):
        if len(parts[-1]) > keys and _room(parts[-1] + [place], least, width) < 0:
            parts.append(list(range(keys)))
        parts[-1].append(place)
    return parts


def _room(part: Sequence[int], least: Sequence[int], width: int) -> int:
    return width - 1 - sum(least[place] + _FRAME for place in part)


def _widths(
    part: Sequence[int], least: Sequence[int], best: Sequence[int], width: int
) -> dict[int, int]:
    """Widths of the columns: the least ones, widened in turn by a character as long as there is
    room."""
    widths, room = {place: least[place] for place in part}, _room(part, least, width)
    while room > 0:
        narrow = [place for place in part if widths[place] < best[place]]
        if not narrow:
            break
        for place in narrow[:room]:
            widths[place] += 1
        room -= len(narrow)
    return widths
