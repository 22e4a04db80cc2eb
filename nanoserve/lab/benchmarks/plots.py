"""Charts of reports: bars of a table's columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoserve.commands.tables import FEW_MARK, Column
from nanoserve.lab.charts import Bars, Chart, draw

_NAME_WIDTH, _ROW_HEIGHT = 4.0, 0.35  # inches
Rows = Sequence[Mapping[str, Any]]


def text_bars(x: str, names: Sequence[str], texts: Sequence[str], title: str = "") -> Bars:
    """Bars whose lengths are the numbers that stand at their ends."""
    lengths = []
    for text in texts:
        digits = text.replace(",", "").rstrip(f"%x{FEW_MARK}")
        if text == "-":
            digits = "0"
        lengths.append(float(digits))
    return Bars(title=title, x=x, names=names, parts={"": lengths}, texts=texts)


def plot_bars(path: Path, title: str, label: str, values: Sequence[Column], rows: Rows) -> None:
    """Draw one panel per column of ``values``, one bar per row; ``label`` is a format string over
    the row. Columns of a single row are bars of one panel for each unit, the last word of their
    headings. Raises RuntimeFailure."""
    names = [label.format(**row) for row in rows]
    panels = []
    if len(rows) == 1 and len(values) > 1:
        for unit in dict.fromkeys(column.heading.split()[-1] for column in values):
            several = [column for column in values if column.heading.split()[-1] == unit]
            headings = [column.heading.removesuffix(f" {unit}") for column in several]
            panels.append(
                text_bars(unit, headings, [column.text(rows[0]) for column in several], names[0])
            )
    else:
        for column in values:
            panels.append(text_bars(column.heading, names, [column.text(row) for row in rows]))
            names = []  # the first panel's stand for all
    most = max(len(one.texts) for one in panels)
    size = (3 + _NAME_WIDTH / len(panels), 1.0 + _ROW_HEIGHT * most)
    draw(Chart(title, panels, columns=len(panels)), path, panel_size=size)


def plot_stacks(
    path: Path, title: str, label: str, x: str, bars: Mapping[str, Mapping[str, str]], rows: Rows
) -> None:
    """Draw a bar per row, made of parts on a common scale, with their sum beside it. ``bars`` has
    the panels by title: fields of a row by their names in the legend. Raises RuntimeFailure."""
    names = [label.format(**row) for row in rows]
    panels: list[Bars] = []
    for heading, fields in bars.items():
        parts = {
            part: [Column("", field).value(row) for row in rows] for part, field in fields.items()
        }
        texts = [f"{sum(several):.3g}" for several in zip(*parts.values(), strict=True)]
        panels.append(Bars(title=heading, x=x, names=names, parts=parts, texts=texts))
        names = []  # the first panel's stand for all
    size = (3.5 + 3.5 / len(panels), 1.4 + _ROW_HEIGHT * len(rows))
    draw(Chart(title, panels), path, panel_size=size)
