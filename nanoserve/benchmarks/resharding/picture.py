"""Phases and how full the KV cache is, over time (Seesaw, figures 2 and 6). Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from nanoserve.benchmarks.variants import KeptRun
from nanoserve.measures.charts import AnnotatedPanel, Band, Chart, ChartCurve, draw
from nanoserve.record.phases import Phase

_TOP = 122.0
"""Where the vertical axis ends: its lines end at 100 %, and above them are the phases."""


def plot_runs(path: Path, title: str, shown: Sequence[KeptRun]) -> None:
    """A panel for each run with two layouts: a strip of its phases, and below what share of the blocks is in use.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    panels = [_panel(one) for one in shown if len(one.layouts) == 2]
    draw(Chart(title, panels, columns=1), path, panel_size=(13.0, 2.7))


def _panel(shown: KeptRun) -> AnnotatedPanel:
    record = shown.record
    began = record.arrivals[0].arrival_time
    times = [moment - began for moment, _ in record.blocks]
    device = [_percent(blocks.used_device, blocks.device) for _, blocks in record.blocks]
    pool = [_percent(blocks.used_host, blocks.host) for _, blocks in record.blocks]
    transitions = sum(phase.kind == "reshard" for phase in record.phases)
    many = "1 transition" if transitions == 1 else f"{transitions} transitions"
    return AnnotatedPanel(
        title=f"{shown.name}: {record.makespan:,.1f} s, {many}",
        x="time from the first arrival on, s",
        y="% of the blocks",
        curves=[
            ChartCurve("host pool in use", times, pool, style="k-"),
            ChartCurve("device blocks in use", times, device, style="C4--"),
        ],
        kind="step",
        bands=[Band(_kind(phase), phase.began - began, phase.began - began + phase.seconds) for phase in record.phases],
        top=_TOP,
    )


def _kind(phase: Phase) -> str:
    """A label with a colour of its own."""
    return {"drain": "draining", "reshard": "re-sharding"}.get(phase.kind) or ("decode" if phase.layout else "prefill")


def _percent(used: int, blocks: int) -> float:
    return 100 * used / blocks if blocks else 0.0
