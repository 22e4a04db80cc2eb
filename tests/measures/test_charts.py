"""Pictures are drawn from data alone."""

from pathlib import Path

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.measures.charts import Chart, ChartCurve, Panel, draw

pytest.importorskip("matplotlib")

LINES = Panel(
    title="latency",
    x="requests per second",
    y="TTFT, s",
    curves=(
        ChartCurve(label="gLLM", xs=(1.0, 2.0), ys=(3.0, 4.0), lows=(2.5, 3.5), highs=(3.5, 4.5)),
        ChartCurve(label="vLLM", xs=(1.0, 2.0), ys=(5.0, 9.0), style="s--"),
    ),
    marks=(4.0,),
)
BARS = Panel(
    title="scaling",
    x="GPUs",
    y="tokens/s",
    kind="bar",
    curves=(
        ChartCurve(label="gLLM", xs=("1", "2"), ys=(1.0, 2.0), lows=(0.9, 1.9), highs=(1.1, 2.1)),
        ChartCurve(label="", xs=("1", "2"), ys=(1.0, 1.5)),
    ),
)


def test_lines_and_bars_become_a_picture(tmp_path: Path) -> None:
    draw(Chart("both", (LINES, BARS, LINES), columns=2), tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="cannot write"):
        draw(Chart("both", (LINES,)), tmp_path / "missing" / "both.png")
