"""Pictures as data: panels of curves or bars with axes that say what they are, drawn by matplotlib at the very end."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.measures.metrics import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PANEL_WIDTH, _PANEL_HEIGHT = 4.2, 3.4
_LONE_WIDTH = 7.0
"""Width of the panel of a chart with one column."""
_BAR_GROUP = 0.8
"""Share of the room between two ticks that bars fill."""
_HEAD = 0.6
_ROOM_FOR_LEGEND = 1.3
_MOST_CHARACTERS = 28
"""Names below an axis are rotated if they are longer together."""


class ChartCurve(msgspec.Struct, frozen=True):
    """One line of a panel, or one bar of each of its groups."""

    label: str
    """In the legend; empty for none."""
    xs: Sequence[float] | Sequence[str]
    """Numbers for lines; for bars the names of the groups, equal for all curves of a panel."""
    ys: Sequence[float]
    """One value for each of ``xs``."""
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    """How far ys spread over seeds; empty where that is not shown."""
    style: str = "o-"
    """Line style of matplotlib: "o-", "--", "," ..."""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Axes with curves."""

    title: str
    """What it shows."""
    x: str
    y: str
    """What the axes are, with units."""
    curves: Sequence[ChartCurve]
    """What is drawn."""
    kind: Literal["line", "bar", "stack"] = "line"
    """"line", or "bar": groups beside one another, or "stack": bars on top of one another, the first lowest."""
    log_x: bool = False
    log_y: bool = False
    """Logarithmic axes."""
    from_zero: bool = True
    """The vertical axis begins at zero."""
    marks: tuple[float, ...] = ()
    """Values on the vertical axis that a dotted line marks."""


class Chart(msgspec.Struct, frozen=True):
    """A picture: panels in rows."""

    title: str
    """Title above all panels."""
    panels: Sequence[Panel]
    """Panels from left to right, row by row."""
    columns: int = 4
    """Panels in a row."""


def panel(
    title: str,
    x: str,
    y: str,
    xs: Sequence[float] | Sequence[str],
    heights: Mapping[str, Sequence[float] | Sequence[Spread]],
    *,
    styles: Mapping[str, str] | str = "o-",
    **options: Any,
) -> Panel:
    """Axes whose curves share their places on the horizontal axis.

    Args:
        heights: of each curve, by its label; spreads are drawn with the range over seeds.
        styles: of all curves, or by label where not "o-".
        options: other fields of Panel.
    """
    curves = []
    for label, ys in heights.items():
        style = styles if isinstance(styles, str) else styles.get(label, "o-")
        spreads = [one for one in ys if isinstance(one, Spread)]
        means = [one.mean if isinstance(one, Spread) else one for one in ys]
        lows, highs = [one.low for one in spreads], [one.high for one in spreads]
        curves.append(ChartCurve(label, xs, means, lows, highs, style))
    return Panel(title=title, x=x, y=y, curves=curves, **options)


def draw(chart: Chart, path: Path) -> None:
    """Write a PNG file.

    Raises:
        RuntimeFailure: if it cannot be written.
    """
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    width = _LONE_WIDTH if columns == 1 else columns * _PANEL_WIDTH
    figure = titled_figure(chart.title, width, _HEAD + rows * _PANEL_HEIGHT)
    places = [axes for line in figure.subplots(rows, columns, squeeze=False) for axes in line]
    for axes, panel in zip(places, chart.panels, strict=False):
        _draw_panel(axes, panel)
    for axes in places[len(chart.panels) :]:
        axes.set_axis_off()
    save_figure(figure, path)


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    if panel.kind == "bar":
        _draw_bars(axes, panel.curves)
    elif panel.kind == "stack":
        _draw_stacks(axes, panel.curves)
    else:
        for curve in panel.curves:
            (line,) = axes.plot(curve.xs, curve.ys, curve.style, label=curve.label or None, markersize=4)
            if curve.lows:
                axes.fill_between(curve.xs, curve.lows, curve.highs, color=line.get_color(), alpha=0.2, linewidth=0)
    for mark in panel.marks:
        axes.axhline(mark, color="black", linestyle=":", linewidth=1)
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.log_x:
        axes.set_xscale("log")
    if panel.log_y:
        axes.set_yscale("log")
    elif panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if any(curve.label for curve in panel.curves):
        axes.legend(fontsize="small", ncols=len(panel.curves) if panel.kind == "bar" else 1)


def _draw_bars(axes: "Axes", curves: Sequence[ChartCurve]) -> None:
    """Groups stand at 0, 1, 2 ...; the bars of a group beside one another, in the order of the curves."""
    groups = curves[0].xs
    width = _BAR_GROUP / len(curves)
    for number, curve in enumerate(curves):
        offset = (number - (len(curves) - 1) / 2) * width
        places = [group + offset for group in range(len(groups))]
        spread = None
        if curve.lows:
            low = [y - below for y, below in zip(curve.ys, curve.lows, strict=True)]
            high = [above - y for y, above in zip(curve.ys, curve.highs, strict=True)]
            spread = [low, high]
        axes.bar(places, curve.ys, width, yerr=spread, capsize=2, label=curve.label or None)
    _name_groups(axes, groups)
    if any(curve.label for curve in curves):
        axes.set_ylim(top=_ROOM_FOR_LEGEND * max(max(curve.ys) for curve in curves))


def _draw_stacks(axes: "Axes", curves: Sequence[ChartCurve]) -> None:
    """One bar at 0, 1, 2 ..., made of what the curves have there."""
    groups = curves[0].xs
    tops = [0.0] * len(groups)
    for curve in curves:
        axes.bar(range(len(groups)), curve.ys, _BAR_GROUP, bottom=tops, label=curve.label or None)
        tops = [top + y for top, y in zip(tops, curve.ys, strict=True)]
    _name_groups(axes, groups)
    axes.set_ylim(top=_ROOM_FOR_LEGEND * max(tops))


def _name_groups(axes: "Axes", groups: Sequence[float | str]) -> None:
    names = [str(group) for group in groups]
    axes.set_xticks(range(len(groups)), names)
    if sum(len(name.partition("\n")[0]) for name in names) > _MOST_CHARACTERS:
        axes.tick_params(axis="x", labelrotation=20)
