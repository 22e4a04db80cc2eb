"""The picture of a sweep of loads: latencies, output, the limits that were asked for, and the best
load. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.commands.tables import Column
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.serving.records import knee
from nanoserve.lab.benchmarks.serving.requests import TRACE_TICK
from nanoserve.lab.charts import Chart, Note, Panel, panel

_PERCENTILES = ("p50", "p90", "p99")
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2EL"}
PANEL_SIZE = (5.2, 3.4)  # inches
_FAR_APART = 8.0  # ratio of values beyond which an axis is logarithmic


def load_of(row: Mapping[str, Any]) -> float:
    """How much a row's load asks for: clients, or requests per second; those of a trace as it is,
    to three digits."""
    if row["tick"] == TRACE_TICK:
        return float(f"{row['offered_requests_per_s'] or math.inf:.3g}")
    return float(row["tick"])


@dataclass(frozen=True, slots=True)
class _Sweep:
    """The part that all panels share: the axis of loads, and the load that a line marks."""

    axis: str
    loads: Sequence[float]
    mark: float | None
    mark_name: str

    def panel(
        self,
        title: str,
        unit: str,
        lines: Mapping[str, Sequence[float]],
        limit: float | None = None,
    ) -> Panel:
        """Lines over the loads and the ``limit`` they are to keep; axes are logarithmic if values
        lie far apart."""
        heights = [value for ys in lines.values() for value in ys if value > 0]
        marks, notes = [], []
        if limit is not None:
            heights.append(limit)
            marks.append(limit)
            notes.append(Note(f"limit {limit:,.0f} {unit}", self.loads[0], limit, right=2, up=6))
        vertical_marks: tuple[float, ...] = ()
        if self.mark is not None:
            vertical_marks = (self.mark,)
            aside = 3
            if self.mark > self.loads[0]:
                aside = -3
            notes.append(Note(self.mark_name, self.mark, max(heights), right=aside))
        return panel(
            title,
            self.axis,
            f"{title}, {unit}",
            self.loads,
            lines,
            log_x=_are_far_apart(self.loads),
            log_y=_are_far_apart(heights),
            marks=tuple(marks),
            vertical_marks=vertical_marks,
            notes=notes,
        )


def _are_far_apart(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > _FAR_APART * min(values) > 0


def load_chart(report: Report, title: str) -> Chart:
    """Percentiles of latencies, and the output, over the loads; lines mark the limits of --slo and
    the best load."""
    rows = sorted(report.rows, key=load_of)
    finite = [row for row in rows if load_of(row) < math.inf]
    # requests that come all at once have no place on the axis, but for a lone point
    rows = finite or rows[:1]
    sweep = _sweep(report, rows)
    slo: Mapping[str, float] = {}
    if rows[0]["goodput"]:
        slo = rows[0]["goodput"]["slo_ms"]
    panels = []
    for name, label in _LATENCIES.items():
        lines = {percentile: _known(rows, f"{name}_ms.{percentile}") for percentile in _PERCENTILES}
        lines = {percentile: ys for percentile, ys in lines.items() if not all(map(math.isnan, ys))}
        if lines:
            panels.append(sweep.panel(label, "ms", lines, slo.get(name)))
    panels.append(
        sweep.panel("output", "tokens/s", {"": [row["output_tokens_per_s"] for row in rows]})
    )
    return Chart(report.titled(title), panels, columns=2)


def _sweep(report: Report, rows: Sequence[Mapping[str, Any]]) -> _Sweep:
    axis = "requests/s offered"
    if rows[0]["concurrency"]:
        axis = "clients"
    loads = [load_of(row) for row in rows]
    found = report.document.get("highest_rate")
    if found is not None and found["rate"] is not None:
        return _Sweep(axis, loads, found["rate"], "highest rate")
    if loads == [math.inf]:
        return _Sweep("all at once", [0.0], None, "")
    bend = knee(rows)
    if bend is None:
        return _Sweep(axis, loads, None, "knee")
    return _Sweep(axis, loads, load_of(bend), "knee")


def _known(rows: Sequence[Mapping[str, Any]], path: str) -> list[float]:
    """A percentile of each row; NaN where there is none, or where it is of too few values."""
    column = Column("", path)
    values = []
    for row in rows:
        value = column.value(row)
        if value is None or column.is_of_few(row):
            value = math.nan
        values.append(float(value))
    return values
