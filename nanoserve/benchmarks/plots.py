"""Charts of reports as PNG files; needs matplotlib, which the extra [plot] installs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.benchmarks.tables import Column
from nanoserve.errors import RuntimeFailure, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL = "pip install 'nanoserve[plot]'"


def check_plotting(path: Path | None) -> None:
    """Before anything is measured: can the picture be drawn?

    Raises:
        UsageError: if matplotlib is missing.
    """
    from importlib.util import find_spec

    if path is not None and find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: {INSTALL}")


def plot_bars(path: Path, title: str, label: str, values: Sequence[Column], rows: Sequence[dict[str, Any]]) -> None:
    """One panel per column of ``values``, one bar per row; ``label`` is a format string over the row.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [label.format(**row) for row in rows]
    figure = Figure(figsize=(4 + 3 * len(values), 1.5 + 0.35 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for panel, column in zip(panels, values, strict=True):
        texts = [column.text(row) for row in rows]
        bars = panel.barh(names, [_number(text) for text in texts])
        panel.bar_label(bars, texts, padding=3)
        panel.margins(x=0.2)
        panel.set_xlabel(column.heading)
    panels[0].invert_yaxis()
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a drawn figure as PNG.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise RuntimeFailure(f"cannot write {path}: {error.strerror or error}") from error


def _number(text: str) -> float:
    return 0.0 if text == "-" else float(text.replace(",", "").rstrip("%x"))
