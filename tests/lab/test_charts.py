"""Pictures are drawn from data alone."""

from pathlib import Path

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.charts import Bars, Chart, ChartCurve, Panel, draw, draw_figure

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


def test_labels_that_panels_have_in_common_are_told_once() -> None:
    figure = draw_figure(Chart("three", (LINES, LINES, BARS)))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["gLLM", "vLLM"]
    alone = draw_figure(Chart("one", (LINES,)))
    assert not alone.legends
    assert alone.axes[0].get_legend() is not None


def test_no_two_of_many_lines_look_alike() -> None:
    """There are ten colours."""
    curves = [ChartCurve(f"{number}", (1.0, 2.0), (1.0, number)) for number in range(25)]
    (axes,) = draw_figure(Chart("many", (Panel(title="", x="", y="", curves=curves),))).axes
    looks = {
        (line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()
    }
    assert len(looks) == 25


def test_parts_of_horizontal_bars_have_one_scale() -> None:
    bars = Bars(
        x="time, s",
        names=("cold", "warm"),
        parts={"load": (3.0, 1.0), "token": (1.0, 1.0)},
        texts=("4", "2"),
    )
    (axes,) = draw_figure(Chart("starts", (bars,))).axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        (0, 3),
        (0, 1),
        (3, 1),
        (1, 1),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cold", "warm"]
    assert axes.get_xlabel() == "time, s"


def test_the_last_value_of_an_area_is_as_wide_as_the_others() -> None:
    curves = (
        ChartCurve("decodes", (0, 1, 2), (4, 4, 1)),
        ChartCurve("prompt tokens", (0, 1, 2), (60, 0, 0)),
    )
    (axes,) = draw_figure(
        Chart("tokens", (Panel(title="", x="step", y="tokens", kind="area", curves=curves),))
    ).axes
    assert axes.get_xlim() == (0, 3)


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match="cannot write"):
        draw(Chart("both", (LINES,)), tmp_path / "missing" / "both.png")
