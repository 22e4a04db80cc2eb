"""The lecture's text diffusion, counted and measured."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve.lab.papers import text_diffusion
from nanoserve.lab.papers.framework import Finding, Scale, load_paper

FLOPS, BANDWIDTH = 989e12, 3.35e12  # of an H100's data sheet
SPEEDUPS = {1: 12.8, 8: 1.85, 16: 0.92, 128: 0.12}


def make_figure() -> Finding:
    (figure,) = load_paper("lecture").chosen("diffusion")

    def run_nothing(jobs: object) -> None:
        raise AssertionError("the figure is counted")

    return figure.make(Scale(seeds=(0,), full=False), run_nothing)  # type: ignore[arg-type]


def test_the_speedups_are_those_of_arithmetic() -> None:
    """A step reads the weights, 2 bytes each, or multiplies and adds them for each token; 256
    tokens take 256 steps of one for each sequence, or 20 steps of all."""

    def seconds(tokens: int) -> float:
        return max(2 / BANDWIDTH, 2 * tokens / FLOPS)

    found = make_figure()
    closed = {row["batch"]: row["closed"] for row in found.rows if "closed" in row}
    for batch, speedup in closed.items():
        expected = 256 * seconds(batch) / (20 * seconds(256 * batch))
        assert speedup == pytest.approx(expected, rel=1e-12)
    assert {batch: round(closed[batch], 2) for batch in SPEEDUPS} == SPEEDUPS
    ours = [claim.ours.mean for claim in found.claims]
    assert [round(one, 2) for one in ours[:4]] == list(SPEEDUPS.values())
    assert ours[4] == 15 and round(ours[5]) == 295


def test_activations_and_the_head_change_little() -> None:
    for row in make_figure().rows:
        if "closed" in row:
            assert row["exact"] == pytest.approx(row["closed"], rel=0.1)


@pytest.fixture
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two turns of a batch of 4 that wrote 128 tokens each, once in 40 steps and once in 24."""
    lines = [
        "model,batch,repeat,tokens,steps,seconds,processor_seconds",
        "storyteller,4,0,512,129,2.0,1.0",
        "block diffusion,4,0,512,40,1.0,1.0",
        "storyteller,4,1,512,129,3.0,1.0",
        "block diffusion,4,1,512,24,1.0,1.0",
    ]
    path = tmp_path / "diffusion.csv"
    path.write_text("\n".join(lines))
    monkeypatch.setattr(text_diffusion, "_DATA", path)
    text_diffusion.shipped_timings.cache_clear()
    yield
    text_diffusion.shipped_timings.cache_clear()


@pytest.mark.usefixtures("timings")
def test_measured_points_stand_beside_the_counted_ones() -> None:
    found = make_figure()
    (row,) = (row for row in found.rows if "measured" in row)
    assert (row["batch"], row["tokens"], row["text"]) == (4, "4.0", "2.50x [2.00x..3.00x]")
    assert found.chart is not None
    curve = found.chart.panels[0].curves[-1]  # type: ignore[union-attr]
    assert (curve.label, curve.xs, curve.ys) == ("storyteller, measured", [4.0], [2.5])
    assert (curve.lows, curve.highs) == ([2.0], [3.0])


def test_the_figure_is_whole_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_diffusion, "_DATA", tmp_path / "none.csv")
    text_diffusion.shipped_timings.cache_clear()
    found = make_figure()
    text_diffusion.shipped_timings.cache_clear()
    assert {row["model"] for row in found.rows} == {text_diffusion.MODEL}
    assert found.chart is not None
    assert len(found.chart.panels[0].curves) == 2  # type: ignore[union-attr]
