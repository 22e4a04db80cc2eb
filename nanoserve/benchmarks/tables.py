"""Tables on the terminal, built from the rows of a report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDTH_OF_A_FILE = 200
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, where its value lies in a row ("ttft_ms.p50"), how it is written and to which side."""

    heading: str
    path: str
    format: str = ""
    justify: Literal["left", "right"] = "right"

    def text(self, row: Mapping[str, Any]) -> str:
        """The value as it is shown; a dash where there is none."""
        value: Any = row
        for part in self.path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return _NOTHING if value is None else format(value, self.format)


def print_table(title: str, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> None:
    """To stdout; into a pipe or a file as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_A_FILE)
    # A Text is shown as it is: a model's name may hold what rich would take for markup.
    table = Table(title=Text(title, style="bold"), title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column.heading, justify="left" if place == 0 else column.justify, no_wrap=place == 0)
    for row in rows:
        table.add_row(*(column.text(row) for column in columns))
    console.print(table)
