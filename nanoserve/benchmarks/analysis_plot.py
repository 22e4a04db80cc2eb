"""The picture of ``nanoserve analyze``: a roofline with its operators, and decoding against batch size."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.costs.analysis import Analysis, BatchRow, OperatorRow
from nanoserve.measures.figures import save_figure, titled_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

_STYLES = (("o", -2), ("s", -30))
"""Marker of prefill and decode, and by how many points the names are set lower, so that they do not overlap."""
_NEARBY = 1.6
"""Points whose coordinates differ by less than this factor share a label."""


def plot_analysis(
    path: Path,
    title: str,
    analysis: Analysis,
    phases: Mapping[str, Sequence[OperatorRow]],
    batches: Sequence[BatchRow],
) -> None:
    """Write a PNG file.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    figure = titled_figure(title, 13, 5.5)
    roof, curve = figure.subplots(1, 2)
    _draw_roofline(roof, analysis, phases)
    _draw_batches(curve, analysis, batches)
    save_figure(figure, path)


def _draw_roofline(axes: "Axes", analysis: Analysis, phases: Mapping[str, Sequence[OperatorRow]]) -> None:
    """Operations per second against operations per byte: under a slope of bandwidth and a ceiling of peak."""
    device = analysis.costs.machine.device
    found = {phase: [row for row in rows if row.intensity] for phase, rows in phases.items()}
    intensities = [row.intensity for rows in found.values() for row in rows if row.intensity]
    ends = (
        min(*intensities, device.intensity) / 3,
        max(*intensities, device.intensity) * 60,
    )  # room for names at the right
    knees = (ends[0], device.intensity, ends[1])
    axes.plot(knees, [min(device.flops, knee * device.memory_bandwidth) for knee in knees], color="black")
    axes.annotate(
        f"{device.name}: {device.intensity:.0f} FLOP/byte",
        (device.intensity, device.flops),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
    )
    points_of = {phase: [_point(row) for row in rows] for phase, rows in found.items()}
    everything = [point for points in points_of.values() for point in points]
    for (phase, rows), (marker, lower) in zip(found.items(), _STYLES, strict=True):
        points = points_of[phase]
        (line,) = axes.plot(*zip(*points, strict=True), marker, label=phase, alpha=0.8)
        for names, point in _grouped([row.operator for row in rows], points):
            axes.annotate(
                ", ".join(names),
                _right_end(point, everything),
                xytext=(8, lower),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=line.get_color(),
            )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="FLOP per second and device")
    axes.grid(which="major", alpha=0.3)
    axes.legend(loc="lower right")


def _point(row: OperatorRow) -> Point:
    return row.intensity or 0.0, row.flops / row.seconds


def _right_end(point: Point, points: Sequence[Point]) -> Point:
    """The rightmost of the points beside this one, whichever phase they are of: names behind it hide none of them."""
    return max(other for other in points if all(map(_is_near, other, point)))


def _is_near(mine: float, theirs: float) -> bool:
    return 1 / _NEARBY < mine / theirs < _NEARBY


def _grouped(names: Sequence[str], points: Sequence[Point]) -> list[tuple[list[str], Point]]:
    """Names of points that lie near each other, with the place of the first."""
    groups: list[tuple[list[str], Point]] = []
    for name, point in zip(names, points, strict=True):
        for members, place in groups:
            if all(map(_is_near, point, place)):
                members.append(name)
                break
        else:
            groups.append(([name], point))
    return groups


def _draw_batches(axes: "Axes", analysis: Analysis, batches: Sequence[BatchRow]) -> None:
    sizes = [row.batch for row in batches]
    throughput, latency = "tab:blue", "tab:orange"
    axes.plot(sizes, [row.tokens_per_second for row in batches], "o-", color=throughput)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("sequences decoding")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("tokens per second", color=throughput)
    axes.set_ylim(bottom=0)
    other = axes.twinx()
    other.plot(sizes, [row.tpot * 1e3 for row in batches], "s--", color=latency)
    other.set_ylabel("ms per token", color=latency)
    other.set_ylim(bottom=0)
    if analysis.largest_batch:
        axes.axvline(analysis.largest_batch, color="black", linestyle=":")
        axes.annotate(
            f"KV cache full: {analysis.largest_batch:,}",
            (analysis.largest_batch, 0.02),
            xycoords=("data", "axes fraction"),
            rotation=90,
            ha="right",
        )
    axes.grid(alpha=0.3)
