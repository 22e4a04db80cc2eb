"""Marks of a sweep's picture, and the lines that it leaves out."""

import math
from typing import Any

from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.serving.picture import load_chart
from nanoserve.lab.charts import Panel
from nanoserve.record.metrics import Distribution, Slo


def _report(rates: list[float | None], answers: int, slo: Slo | None) -> Report:
    report = Report("serve", {}, None)
    for rate in rates:
        load = rate or 1.0
        waited = Distribution.of([1000 / (1 - min(load, 0.95))] * answers)
        goodput = (
            None if slo is None else {"slo_ms": slo, "requests_per_s": load, "attainment": 1.0}
        )
        row: dict[str, Any] = {"case": str(rate), "tick": str(rate or "inf"), "concurrency": None}
        row |= {"completed": answers, "output_tokens_per_s": load, "goodput": goodput}
        report.add({**row, "ttft_ms": waited, "tpot_ms": None, "e2el_ms": waited})
    return report


def _panels(report: Report) -> dict[str, Panel]:
    return {one.title: one for one in load_chart(report, "title").panels if isinstance(one, Panel)}


def test_limits_and_the_knee_are_marked() -> None:
    panels = _panels(_report([0.9, None, 0.1, 0.5], 100, Slo(ttft=2500.0)))
    assert list(panels) == ["TTFT", "E2EL", "output"], "no answer has a TPOT"
    assert [curve.label for curve in panels["TTFT"].curves] == ["p50", "p90", "p99"]
    assert all(curve.xs == [0.1, 0.5, 0.9] for curve in panels["TTFT"].curves), (
        "all at once is no place on the axis"
    )
    assert [one.marks for one in panels.values()] == [(2500.0,), (), ()]
    assert [one.vertical_marks for one in panels.values()] == [(0.5,)] * 3
    assert [note.text for note in panels["TTFT"].notes] == ["limit 2,500 ms", "knee"]


def test_a_percentile_of_few_values_is_no_line() -> None:
    panels = _panels(_report([0.5, 0.7], 12, None))
    assert [curve.label for curve in panels["TTFT"].curves] == ["p50", "p90"]
    assert panels["TTFT"].vertical_marks == () and not math.isnan(panels["TTFT"].curves[0].ys[0])


def test_the_highest_rate_is_marked_and_a_lone_load_is_drawn() -> None:
    report = _report([0.9, None, 0.1, 0.5], 100, None)
    report.put("highest_rate", {"rate": 0.7, "undecided": [], "words": ""})
    assert [one.vertical_marks for one in _panels(report).values()] == [(0.7,)] * 3
    assert _panels(_report([None], 100, None))["output"].x == "all at once"
