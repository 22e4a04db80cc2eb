"""Charts as data, and the one place that draws them: PNG files by matplotlib, which the extra
[plot] installs."""

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from nanoserve.errors import UsageError
from nanoserve.record.metrics import Spread
from nanoserve.utils.files import replace_file
from nanoserve.utils.installation import install_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "decodes": "#0072B2",
    "decode": "#0072B2",
    "prompt tokens": "#E69F00",
    "prefill": "#E69F00",
    "idle": "#EEEEEE",
    "draining": "#999999",
    "re-sharding": "#CC79A7",
}
"""Colours of labels, one for each meaning, from Okabe and Ito's palette, which the colour-blind can
tell apart."""
_CYCLE = [
    "#332288",
    "#CC6677",
    "#117733",
    "#88CCEE",
    "#882255",
    "#999933",
    "#44AA99",
    "#AA4499",
    "#DDCC77",
    "#000000",
]
"""Paul Tol's muted scheme for everything else, made for the same eyes, and black."""
_STYLES = ("o-", "s--", "^:")
"""Lines of curves that ask for none. When all colours are used, they begin again with the next kind
of line."""
_LONE_WIDTH = 7.0  # width of the panel of a chart with one column, in inches
# height of the title and of each line of a legend below the panels, in inches
_HEAD, _FOOT = 0.6, 0.3
_BAR_GROUP = 0.8  # share of the room between two ticks that bars fill
_ROOM_FOR_LEGEND = 1.3
_CHARACTER_WIDTH = 0.088  # inches of a character of the title, about
_MOST_CHARACTERS = 28  # names below an axis are rotated if they are longer together
_MOST_OVER_BARS = 3  # labels for which there is room above bars
_MOST_LINES = 6  # a legend of more lines stands beside its panel, or in two lines below all panels
_MOST_IN_DIGITS = 1e6  # values of a logarithmic axis from here on are written as powers
# points that have ticks of their own, and their least distance as a share of all
_MOST_TICKS, _TICK_ROOM = 9, 0.08
_STRIP = 0.88  # from which share of a panel's height on its bands are drawn in full colour
_DIGIT_SHARE = 0.0095  # width that a digit of a step's number needs, as a share of the time shown
_MARK: dict[str, Any] = {"color": "black", "linestyle": ":", "linewidth": 1}
_NUMBER_BOX = {
    "boxstyle": "round,pad=0.1",
    "facecolor": "white",
    "edgecolor": "none",
    "alpha": 0.75,
}


class ChartCurve(msgspec.Struct, frozen=True):
    """One line of a panel, or one bar of each of its groups."""

    label: str  # in the legend; empty for none
    xs: Sequence[float] | Sequence[str]
    """For bars the names of the groups, equal for all curves of a panel. Named points of lines have
    equal distances."""
    ys: Sequence[float]  # one value for each of ``xs``
    lows: Sequence[float] = ()
    # how far ys spread over repeated runs; empty where that is not shown
    highs: Sequence[float] = ()
    # line style of matplotlib: "o-", "--", "," ...; empty for one that no other curve has
    style: str = ""


class Band(msgspec.Struct, frozen=True):
    """A part of the horizontal axis with a colour of its own."""

    label: str
    left: float
    right: float


class Note(msgspec.Struct, frozen=True):
    """A text at a point, moved by some typographic points."""

    text: str
    x: float
    y: float
    right: float = 0.0
    up: float = 0.0
    curve: int | None = None  # the curve whose colour it has; black without one


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Axes with curves, bands and texts."""

    title: str
    x: str
    y: str  # what the axes are, with units
    curves: Sequence[ChartCurve]
    kind: Literal["line", "step", "bar", "stack", "area"] = "line"
    """"step": lines that hold a value until the next point; "bar": groups beside one another;
    "stack": bars on top of one another, the first lowest; "area": steps on top of one another."""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True  # the vertical axis begins at zero
    marks: tuple[float, ...] = ()  # values on the vertical axis that a dotted line marks
    bands: Sequence[Band] = ()
    notes: Sequence[Note] = ()
    vertical_marks: Sequence[float] = ()  # values on the horizontal axis that a dotted line marks
    top: float | None = None  # end of the vertical axis
    right: float | None = None  # end of the horizontal axis, which then begins at 0


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Horizontal bars, one below the other, on one scale."""

    title: str = ""
    x: str  # what their lengths are, with the unit
    names: Sequence[str]  # what each bar is; empty to leave the names to the panel at the left
    # of each bar, by label; one part without a label for plain bars
    parts: Mapping[str, Sequence[float]]
    texts: Sequence[str]  # what stands at the end of each bar


class GanttSpan(msgspec.Struct, frozen=True):
    """A bar of a Gantt panel."""

    row: int
    left: float
    right: float
    parts: Mapping[str, float]  # how its height is divided among labels
    text: str = ""  # what stands in it, if there is room


class Gantt(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of each row over time."""

    title: str
    x: str
    rows: Sequence[str]  # names of the rows, from top to bottom
    spans: Sequence[GanttSpan]
    end: float  # the axis goes from 0 to here


AnyPanel = Panel | Bars | Gantt


class Chart(msgspec.Struct, frozen=True):
    """A picture: panels in rows."""

    title: str
    # from left to right, row by row; one that is alone in the last row has all of it
    panels: Sequence[AnyPanel]
    columns: int = 4  # panels in a row


def panel(
    title: str,
    x: str,
    y: str,
    xs: Sequence[float] | Sequence[str],
    heights: Mapping[str, Sequence[float] | Sequence[Spread]],
    *,
    styles: Mapping[str, str] | str = "",
    **options: Any,
) -> Panel:
    """Axes whose curves share their places on the horizontal axis; the options are other fields of
    Panel.

    ``heights`` has the values of each curve by its label; spreads are drawn with the range over
    seeds. ``styles`` is for all curves, or by label for those that do not leave it to the drawing.
    """
    curves = []
    for label, ys in heights.items():
        style = styles
        if not isinstance(style, str):
            style = style.get(label, "")
        spreads = [one for one in ys if isinstance(one, Spread)]
        means = [one.mean if isinstance(one, Spread) else one for one in ys]
        curves.append(
            ChartCurve(
                label, xs, means, [one.low for one in spreads], [one.high for one in spreads], style
            )
        )
    return Panel(title=title, x=x, y=y, curves=curves, **options)


def check_plotting(path: Path | None) -> None:
    """Before anything is measured: raises UsageError if matplotlib is missing for this picture."""
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib: {install_command('plot')}")


def draw(chart: Chart, path: Path, *, panel_size: tuple[float, float] = (4.2, 3.4)) -> None:
    """Write a PNG file. See ``draw_figure``. Raises RuntimeFailure if it cannot be written."""
    drawn = BytesIO()
    draw_figure(chart, panel_size).savefig(drawn, format="png", dpi=150)
    replace_file(path, drawn.getvalue())


def draw_figure(chart: Chart, panel_size: tuple[float, float] = (4.2, 3.4)) -> "Figure":
    """Draw a chart without a screen; ``panel_size`` is the width and height of a panel, in
    inches."""
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns, (width, height) = min(chart.columns, len(chart.panels)), panel_size
    rows = math.ceil(len(chart.panels) / columns)
    lines = chart.title.splitlines()
    widest = max(_LONE_WIDTH, columns * width, _CHARACTER_WIDTH * max(map(len, lines)))
    size = (widest, _HEAD + (len(lines) - 1) * _FOOT + rows * height)
    # "C0" in a style is the first of these colours
    with rc_context({"axes.prop_cycle": cycler(color=_CYCLE)}):
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(chart.title)
        grid = figure.add_gridspec(rows, columns)
        drawn: list[tuple[Axes, dict[str, Any]]] = []
        for number, one in enumerate(chart.panels):
            row, column = divmod(number, columns)
            place = grid[row, column]
            if column == 0 and number == len(chart.panels) - 1:
                place = grid[row, :]  # alone in its row
            axes = figure.add_subplot(place)
            drawn.append((axes, _draw_panel(axes, one)))
    _add_legends(figure, drawn)
    return figure


def _add_legends(figure: "Figure", drawn: Sequence[tuple["Axes", Mapping[str, Any]]]) -> None:
    """One legend below all panels with labels in common or many bars, and one in each of the
    others."""
    common: dict[str, Any] = {}
    uses = Counter(label for _, handles in drawn for label in handles)
    for axes, handles in drawn:
        legend = partial(axes.legend, handles.values(), handles.keys(), fontsize="small")
        if any(uses[label] > 1 for label in handles) or (
            axes.containers and len(handles) > _MOST_OVER_BARS
        ):
            common = {**handles, **common}
        elif len(handles) > _MOST_LINES:
            legend(loc="upper left", bbox_to_anchor=(1, 1))
        elif handles:
            ncols = 1
            if axes.containers:
                ncols = len(handles)
            legend(ncols=ncols)
    if common:
        lines = math.ceil(len(common) / _MOST_LINES)
        figure.set_figheight(figure.get_figheight() + lines * _FOOT)
        ncols = math.ceil(len(common) / lines)
        figure.legend(
            common.values(),
            common.keys(),
            loc="outside lower center",
            ncols=ncols,
            fontsize="small",
        )


def _draw_panel(axes: "Axes", one: AnyPanel) -> dict[str, Any]:
    """Returns what the panel's legend shows, by label."""
    from matplotlib.ticker import LogLocator

    axes.set_title(one.title, fontsize="medium")
    axes.set_xlabel(one.x)
    if isinstance(one, Bars):
        return _draw_horizontal_bars(axes, one)
    if isinstance(one, Gantt):
        return _draw_gantt(axes, one)
    draw_curves = {"bar": _draw_bars, "stack": _draw_bars, "area": _draw_areas}.get(
        one.kind, _draw_lines
    )
    handles = draw_curves(axes, one)
    for mark in one.marks:
        axes.axhline(mark, **_MARK)
    axes.set_ylabel(one.y)
    if one.log_x:
        axes.set_xscale("log")
        if axes.get_xlim()[1] < _MOST_IN_DIGITS:
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.xaxis.set_minor_formatter("")
    if one.log_y:
        axes.set_yscale("log")
        if axes.get_ylim()[1] < _MOST_IN_DIGITS:
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_minor_formatter("{x:,g}")
    elif one.from_zero:
        axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
    if one.kind == "line":
        _tick_few_points(axes, one)
    elif one.kind == "step":
        axes.margins(x=0)
    axes.grid(axis="y", alpha=0.3)
    return handles | _annotate(axes, one)


def _annotate(axes: "Axes", one: Panel) -> dict[str, Any]:
    """Bands: in full colour at the top, pale below. Then texts and vertical marks."""
    handles: dict[str, Any] = {}
    for band in one.bands:
        colour = COLOURS[band.label]
        handles[band.label] = axes.axvspan(
            band.left, band.right, ymin=_STRIP, color=colour, linewidth=0
        )
        axes.axvspan(band.left, band.right, ymax=_STRIP, color=colour, alpha=0.15, linewidth=0)
    for note in one.notes:
        side = "center"
        if note.right > 0:
            side = "left"
        elif note.right < 0:
            side = "right"
        ink: Any = "black"
        if note.curve is not None:
            ink = axes.get_lines()[note.curve].get_color()
        offset: dict[str, Any] = {"xytext": (note.right, note.up), "textcoords": "offset points"}
        axes.annotate(
            note.text, (note.x, note.y), va="center", ha=side, color=ink, fontsize=8, **offset
        )
    for mark in one.vertical_marks:
        axes.axvline(mark, **_MARK)
    if one.top is not None:
        axes.set_ylim(top=one.top)
    if one.bands:
        axes.set_yticks(
            [tick for tick in axes.get_yticks() if 0 <= tick <= _STRIP * axes.get_ylim()[1]]
        )
    if one.right is not None:
        axes.set_xlim(0, one.right)
    return handles


def _draw_lines(axes: "Axes", one: Panel) -> dict[str, Any]:
    handles = {}
    where = "default"
    if one.kind == "step":
        where = "steps-post"
    for number, curve in enumerate(one.curves):
        named = isinstance(curve.xs[0], str)
        places = curve.xs
        if named:
            places = range(len(curve.xs))
        colour: dict[str, Any] = {}
        if curve.label in COLOURS:
            colour["color"] = COLOURS[curve.label]
        style = curve.style or _STYLES[number // len(_CYCLE) % len(_STYLES)]
        (line,) = axes.plot(places, curve.ys, style, markersize=4, drawstyle=where, **colour)
        if curve.lows:
            axes.fill_between(
                places, curve.lows, curve.highs, color=line.get_color(), alpha=0.2, linewidth=0
            )
        if named:
            _name_groups(axes, curve.xs)
        if curve.label:
            line.set_label(curve.label)
            handles[curve.label] = line
    return handles


def _tick_few_points(axes: "Axes", one: Panel) -> None:
    """Ticks where the points are, if these are so few that their numbers do not touch."""
    places = sorted({x for curve in one.curves for x in curve.xs if not isinstance(x, str)})
    if not 0 < len(places) <= _MOST_TICKS or (one.log_x and places[0] <= 0):
        return
    spread = places
    if one.log_x:
        spread = [math.log(x) for x in places]
    room = min((after - before for before, after in pairwise(spread)), default=1.0)
    if room >= _TICK_ROOM * (spread[-1] - spread[0]):
        axes.set_xticks(places, [f"{x:,g}" for x in places])
        axes.set_xticks([], minor=True)


def _draw_bars(axes: "Axes", one: Panel) -> dict[str, Any]:
    """Groups stand at 0, 1, 2 ...: of bars beside one another in the order of the curves, or on top
    of one another."""
    handles: dict[str, Any] = {}
    groups, is_stack = one.curves[0].xs, one.kind == "stack"
    width = _BAR_GROUP
    if not is_stack:
        width /= len(one.curves)
    tops = highest = np.zeros(len(groups))
    for number, curve in enumerate(one.curves):
        places, spread = np.arange(len(groups), dtype=float), None
        if not is_stack:
            places += (number - (len(one.curves) - 1) / 2) * width
        if curve.lows:
            spread = np.abs(np.subtract([curve.lows, curve.highs], curve.ys))
        colour = COLOURS.get(curve.label)
        bars = axes.bar(places, curve.ys, width, bottom=tops, yerr=spread, capsize=2, color=colour)
        highest = np.maximum(highest, tops + curve.ys)
        if is_stack:
            tops = highest
        if curve.label:
            handles[curve.label] = bars
    _name_groups(axes, groups)
    if handles:
        axes.set_ylim(top=_ROOM_FOR_LEGEND * highest.max())
    return handles


def _draw_areas(axes: "Axes", one: Panel) -> dict[str, Any]:
    """A value reaches from its place to the next; the last one is a unit wide."""
    handles, tops = {}, np.zeros(len(one.curves[0].xs) + 1)
    for curve in one.curves:
        below, tops = tops, tops + np.append(curve.ys, curve.ys[-1])
        edges, colour = np.append(curve.xs, float(curve.xs[-1]) + 1), COLOURS.get(curve.label)
        handles[curve.label] = axes.fill_between(
            edges, below, tops, step="post", color=colour, linewidth=0
        )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0)
    return handles


def _name_groups(axes: "Axes", groups: Sequence[float] | Sequence[str]) -> None:
    names = [str(group) for group in groups]
    axes.set_xticks(range(len(groups)), names)
    if sum(len(name.partition("\n")[0]) for name in names) > _MOST_CHARACTERS:
        axes.tick_params(axis="x", labelrotation=20)


def _draw_horizontal_bars(axes: "Axes", one: Bars) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    places, ends = range(len(one.texts)), np.zeros(len(one.texts))
    for label, values in one.parts.items():
        bars = axes.barh(places, values, _BAR_GROUP, left=ends, color=COLOURS.get(label))
        if label:
            handles[label] = bars
        ends = ends + values
    axes.bar_label(bars, one.texts, padding=4, fontsize="small")
    axes.set_yticks(places, one.names or [""] * len(places))
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlim(0, 1.25 * ends.max() or 1.0)
    return handles


def _draw_gantt(axes: "Axes", one: Gantt) -> dict[str, Any]:
    from matplotlib.patches import Patch

    labels = dict.fromkeys(label for span in one.spans for label in span.parts)
    labels["idle"] = None
    axes.barh(range(len(one.rows)), one.end, _BAR_GROUP, color=COLOURS["idle"], zorder=0)
    for span in one.spans:
        width, top = span.right - span.left, span.row - _BAR_GROUP / 2
        for label, part in span.parts.items():
            axes.barh(
                top,
                width,
                _BAR_GROUP * part,
                span.left,
                align="edge",
                color=COLOURS[label],
                linewidth=0,
            )
            top += _BAR_GROUP * part
        axes.barh(
            span.row, width, _BAR_GROUP, span.left, facecolor="none", edgecolor="white", linewidth=1
        )
        is_wide = width > _DIGIT_SHARE * len(span.text) * one.end
        if span.text and is_wide and span.left >= 0 and span.right <= one.end:
            middle: dict[str, Any] = {"ha": "center", "va": "center"}
            axes.text(
                span.left + width / 2, span.row, span.text, fontsize=7, bbox=_NUMBER_BOX, **middle
            )
    axes.set_yticks(range(len(one.rows)), one.rows)
    axes.set(xlim=(0, one.end), ylim=(len(one.rows) - 0.5, -0.5))
    return {label: Patch(color=COLOURS[label]) for label in labels}
