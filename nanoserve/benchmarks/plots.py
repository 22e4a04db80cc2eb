"""Charts of reports as PNG files; needs matplotlib, which the extra [plot] installs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.benchmarks.tables import Column
from nanoserve.measures.figures import save_figure, titled_figure


def plot_bars(path: Path, title: str, label: str, values: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    """One panel per column of ``values``, one bar per row; ``label`` is a format string over the row.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    names = [label.format(**row) for row in rows]
    figure = titled_figure(title, 4 + 3 * len(values), 1.5 + 0.35 * len(rows))
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, values, strict=True):
        texts = [column.text(row) for row in rows]
        bars = panel.barh(names, [_number(text) for text in texts])
        panel.bar_label(bars, texts, padding=3)
        panel.margins(x=0.2)
        panel.set_xlabel(column.heading)
    panels[0].invert_yaxis()
    save_figure(figure, path)


def _number(text: str) -> float:
    return 0.0 if text == "-" else float(text.replace(",", "").rstrip("%x"))


@dataclass(frozen=True, slots=True)
class LinePanel:
    """A part of a chart: what its lines show, and the columns that they are."""

    heading: str
    lines: Sequence[Column]


def plot_lines(
    path: Path, title: str, axis: str, tick: str, panels: Sequence[LinePanel], rows: Sequence[dict[str, Any]]
) -> None:
    """One panel beside another, a line per column over the rows, which lie at equal distances.

    Args:
        axis: what the ticks are.
        tick: the field of a row that stands below it.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    figure = titled_figure(title, 1 + 3.6 * len(panels), 4)
    places = range(len(rows))
    for plot, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for column in panel.lines:
            values = [math.nan if (text := column.text(row)) == "-" else float(text) for row in rows]
            plot.plot(places, values, marker="o", label=column.heading)
        plot.set_xticks(places, [row[tick] for row in rows])
        plot.set_xlabel(axis)
        plot.set_title(panel.heading)
        plot.set_ylim(bottom=0)
        plot.margins(x=0.1)
        plot.grid(axis="y", alpha=0.3)
        plot.legend()
    save_figure(figure, path)
