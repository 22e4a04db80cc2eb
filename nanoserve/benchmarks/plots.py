"""Charts of reports: bars of a table's columns."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoserve.benchmarks.tables import Column
from nanoserve.measures.charts import Bars, Chart, draw

_NAME_WIDTH, _ROW_HEIGHT = 4.0, 0.35
"""Inches."""


def plot_bars(path: Path, title: str, label: str, values: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw one panel per column of ``values``, one bar per row; ``label`` is a format string over the row.

    Where there is a single row, columns of one unit (the last word of their headings) are the bars of one panel.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    if len(rows) == 1 and len(values) > 1:
        panels = _bars_of_one_row(label.format(**rows[0]), values, rows[0])
    else:
        names = [label.format(**row) for row in rows]
        panels = []
        for place, column in enumerate(values):
            texts = [column.text(row) for row in rows]
            heights = {"": [_number(text) for text in texts]}
            panels.append(Bars(x=column.heading, names=[] if place else names, parts=heights, texts=texts))
    most = max(len(one.texts) for one in panels)
    size = (3 + _NAME_WIDTH / len(panels), 1.0 + _ROW_HEIGHT * most)
    draw(Chart(title, panels, columns=len(panels)), path, panel_size=size)


def plot_stacks(
    path: Path,
    title: str,
    label: str,
    x: str,
    stacks: Mapping[str, Mapping[str, str]],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Draw a bar per row, made of parts on a common scale, with their sum beside it.

    Args:
        label: a format string over the row.
        x: what the lengths are, with the unit.
        stacks: fields of a row by their names in the legend, for each panel by its title.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    names = [label.format(**row) for row in rows]
    panels: list[Bars] = []
    for heading, fields in stacks.items():
        parts = {part: [float(Column("", field).text(row)) for row in rows] for part, field in fields.items()}
        texts = [f"{sum(several):.3g}" for several in zip(*parts.values(), strict=True)]
        panels.append(Bars(title=heading, x=x, names=[] if panels else names, parts=parts, texts=texts))
    size = (3.5 + 3.5 / len(panels), 1.4 + _ROW_HEIGHT * len(rows))
    draw(Chart(title, panels), path, panel_size=size)


def _bars_of_one_row(title: str, values: Sequence[Column], row: Mapping[str, Any]) -> list[Bars]:
    panels = []
    for unit in dict.fromkeys(column.heading.split()[-1] for column in values):
        columns = [column for column in values if column.heading.split()[-1] == unit]
        texts = [column.text(row) for column in columns]
        names = [column.heading.removesuffix(f" {unit}") for column in columns]
        heights = {"": [_number(text) for text in texts]}
        panels.append(Bars(title=title, x=unit, names=names, parts=heights, texts=texts))
    return panels


def _number(text: str) -> float:
    return 0.0 if text == "-" else float(text.replace(",", "").rstrip("%x"))
