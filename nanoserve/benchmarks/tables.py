"""Tables on the terminal, built from the rows of a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_OF_A_FILE = 200
_NOTHING = "-"
_FRAME = 3
"""Width around a column: a line, and a space on either side. One more line ends the table."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, where its value lies in a row ("ttft_ms.p50"), how it is written and to which side."""

    heading: str
    path: str
    format: str = ""
    justify: Literal["left", "right"] = "right"

    def value(self, row: Mapping[str, Any]) -> Any:
        """The row's value; None where there is none."""
        value: Any = row
        for part in self.path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def text(self, row: Mapping[str, Any], nothing: str = _NOTHING) -> str:
        """The value as it is shown; `nothing` stands where there is none."""
        value = self.value(row)
        return nothing if value is None else format(value, self.format)


def columns(*formats: tuple[str, *tuple[str | tuple[str, str], ...]]) -> list[Column]:
    """Columns by their format: of each, its heading and the path of its value; a path alone is headed by its end."""
    return [
        Column(one.rpartition(".")[2].replace("_", " "), one, shown) if isinstance(one, str) else Column(*one, shown)
        for shown, *several in formats
        for one in several
    ]


@dataclass(frozen=True, slots=True)
class _Filled:
    """A column with its texts and its width: at least its longest word, for a cut number is none, and at best."""

    column: Column
    texts: Sequence[str]
    least: int
    best: int

    @classmethod
    def of(cls, column: Column, texts: Sequence[str], *, is_key: bool) -> "_Filled":
        best = max(map(cell_len, (column.heading, *texts)))
        words = [word for text in (column.heading, *texts) for word in text.split()]
        return cls(column, texts, best if is_key else max(map(cell_len, words), default=1), best)


def print_table(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, keys: int = 1) -> None:
    """To stdout; what is too wide for the terminal, or for a file's 200 characters, goes on in further tables.

    Args:
        title: above the first table.
        columns: from left to right.
        rows: from top to bottom.
        keys: number of leftmost columns that identify a row; each further table begins with them, too.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    kept = list(rows)
    filled = [
        _Filled.of(column, [column.text(row) for row in kept], is_key=place == 0)
        for place, column in enumerate(columns)
    ]
    for place, part in enumerate(_parts(filled, keys, console.width)):
        # A Text is shown as it is: a model's name may hold what rich would take for markup.
        table = Table(title=None if place else Text(title, style="bold"), title_justify="left")
        for one, width in zip(part, _widths(part, console.width), strict=True):
            side = "left" if one is filled[0] else one.column.justify
            table.add_column(one.column.heading, justify=side, no_wrap=one is filled[0], width=width)
        for texts in zip(*(one.texts for one in part), strict=True):
            table.add_row(*texts)
        console.print(table)


def markdown_table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """A table in GitHub's Markdown. A row that `failed` shows why in its second column."""
    lines = [[column.heading for column in columns], ["---"] * len(columns)]
    for row in rows:
        texts = [column.text(row, nothing="") for column in columns]
        lines.append(texts if row.get("failed") is None else [texts[0], row["failed"], *texts[2:]])
    return "\n".join("| " + " | ".join(text.replace("|", "/") for text in line) + " |" for line in lines)


def _parts(filled: Sequence[_Filled], keys: int, width: int) -> list[list[_Filled]]:
    """The columns of each table, the keys first."""
    first, parts = list(filled[:keys]), [list(filled[:keys])]
    for one in filled[keys:]:
        if len(parts[-1]) > len(first) and _least_width([*parts[-1], one]) > width:
            parts.append(list(first))
        parts[-1].append(one)
    return parts


def _least_width(part: Sequence[_Filled]) -> int:
    return 1 + sum(one.least + _FRAME for one in part)


def _widths(part: Sequence[_Filled], width: int) -> list[int]:
    """Widths of the columns: the least ones, widened in turn by a character as long as there is room."""
    widths, room = [one.least for one in part], width - _least_width(part)
    while room > 0 and (narrow := [place for place, one in enumerate(part) if widths[place] < one.best]):
        for place in narrow[:room]:
            widths[place] += 1
        room -= len(narrow)
    return widths
