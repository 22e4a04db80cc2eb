"""The chart of ``nanoserve analyze``: a roofline with its operators, and decoding against batch size."""

from collections.abc import Mapping, Sequence

from nanoserve.costs.analysis import Analysis, BatchRow, OperatorRow
from nanoserve.measures.charts import AnnotatedPanel, AnyPanel, Chart, ChartCurve, Note

Point = tuple[float, float]

PANEL_SIZE = (6.0, 4.6)
_STYLES = (("o", 12), ("s", -30))
"""Marker of prefill and decode, and by how many points their names are moved where the other phase has points."""
_NEARBY = 1.6
"""Points whose coordinates differ by less than this factor share a label."""


def analysis_chart(
    title: str, analysis: Analysis, phases: Mapping[str, Sequence[OperatorRow]], batches: Sequence[BatchRow]
) -> Chart:
    """Operators under the roofline; tokens per second and time per token against the sequences that decode."""
    panels: list[AnyPanel] = [_roofline(analysis, phases)]
    fits = analysis.largest_batch
    for y, heights in (
        ("tokens per second", [row.tokens_per_second for row in batches]),
        ("ms per token", [row.tpot * 1e3 for row in batches]),
    ):
        note = Note(f"KV cache full: {fits:,}", fits, max(heights) / 25, right=-4)
        panels.append(
            AnnotatedPanel(
                title=f"decoding: {y}",
                x="sequences decoding",
                y=y,
                curves=[ChartCurve("", [row.batch for row in batches], heights)],
                log_x=True,
                notes=[note] if fits else [],
                vertical_marks=[fits] if fits else [],
            )
        )
    return Chart(title, panels, columns=3)


def _roofline(analysis: Analysis, phases: Mapping[str, Sequence[OperatorRow]]) -> AnnotatedPanel:
    """Operations per second against operations per byte: under a slope of bandwidth and a ceiling of peak."""
    device = analysis.costs.machine.device
    found = {phase: [row for row in rows if row.intensity] for phase, rows in phases.items()}
    intensities = [row.intensity for rows in found.values() for row in rows if row.intensity]
    ends = (
        min(*intensities, device.intensity) / 3,
        max(*intensities, device.intensity) * 60,
    )  # room for names at the right
    knees = (ends[0], device.intensity, ends[1])
    ceiling = [min(device.flops, knee * device.memory_bandwidth) for knee in knees]
    curves = [ChartCurve("", knees, ceiling, style="k-")]
    notes = [Note(f"{device.name}: {device.intensity:.0f} FLOP/byte", device.intensity, device.flops, up=8)]
    points_of = {phase: [_point(row) for row in rows] for phase, rows in found.items()}
    everything = [point for points in points_of.values() for point in points]
    for number, ((phase, rows), (marker, lower)) in enumerate(zip(found.items(), _STYLES, strict=True), start=1):
        xs, ys = zip(*points_of[phase], strict=True)
        curves.append(ChartCurve(phase, xs, ys, style=marker))
        for names, point in _grouped([row.operator for row in rows], points_of[phase]):
            end = _right_end(point, everything)
            notes.append(
                Note(", ".join(names), *end, right=8, up=-2 if end in points_of[phase] else lower, curve=number)
            )
    return AnnotatedPanel(
        title="operators under the roofline",
        x="FLOP per byte",
        y="FLOP per second and device",
        curves=curves,
        log_x=True,
        log_y=True,
        notes=notes,
    )


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
