"""Pictures as PNG files; drawing them needs matplotlib, which the extra [plot] installs."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.errors import UsageError
from nanoserve.processes.files import replace_file
from nanoserve.processes.installation import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plotting(path: Path | None) -> None:
    """Before anything is measured: can the picture be drawn?

    Raises:
        UsageError: if matplotlib is missing.
    """
    from importlib.util import find_spec

    if path is not None and find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: {install_command('plot')}")


def titled_figure(title: str, width: float, height: float) -> "Figure":
    """An empty one of that many inches, to be drawn on and saved without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a drawn figure as PNG.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    replace_file(path, drawn.getvalue())
