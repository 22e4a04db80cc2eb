"""Figure pruning: its numbers are those of the file that ships with the package."""

import csv
from pathlib import Path

import pytest

from nanoserve.lab.charts import Panel
from nanoserve.lab.papers import pruned_perplexity
from nanoserve.lab.papers.framework import Finding, Scale, load_paper
from nanoserve.record.metrics import Spread

HEALED = "feed-forward 384 of 768"


@pytest.fixture(scope="module")
def finding() -> Finding:
    (figure,) = load_paper("lecture").chosen("pruning")
    return figure.make(Scale(), lambda jobs: {})


def shipped(model: str, importance: str, training: str) -> dict[int, float]:
    """Perplexities by seed."""
    path = Path(pruned_perplexity.__file__).with_name("pruning.csv")
    with path.open(encoding="utf-8", newline="") as table:
        return {
            int(row["seed"]): float(row["perplexity"])
            for row in csv.DictReader(table)
            if (row["model"], row["importance"], row["training"]) == (model, importance, training)
        }


def test_claims_are_ratios_of_the_shipped_perplexities(finding: Finding) -> None:
    whole = shipped("whole", "none", "none")[0]
    trimmed = shipped(HEALED, "activation", "none")[0]
    healed = shipped(HEALED, "activation", "distilled")
    assert len(healed) == 3

    def over_healed(training: str) -> list[float]:
        fresh = shipped(HEALED, "none", training)
        return [fresh[seed] / healed[seed] for seed in healed]

    wanted = [
        [found / trimmed for found in shipped(HEALED, "random", "none").values()],
        [shipped(HEALED, "magnitude", "none")[0] / trimmed],
        [found / whole for found in healed.values()],
        over_healed("next tokens"),
        over_healed("next tokens, equal time"),
        over_healed("distilled"),
    ]
    assert [claim.ours for claim in finding.claims] == [Spread.of(ratios) for ratios in wanted]


def test_every_kind_of_model_has_a_row(finding: Finding) -> None:
    rows = {(row["model"], row["importance"], row["training"]): row for row in finding.rows}
    assert len(rows) == len(finding.rows) == 1 + 5 * 3 + 4
    whole = rows["whole", "none", "none"]
    assert (whole["parameters"], whole["tokens"], whole["minutes"]) == (4196608, 0, 0)
    fresh = rows[HEALED, "random weights", "equal tokens"]
    assert fresh["tokens"] == rows[HEALED, "activation", "distilled"]["tokens"] > 0
    assert rows[HEALED, "random weights", "equal minutes"]["tokens"] > fresh["tokens"]


def test_equal_minutes_are_equal_to_a_step(finding: Finding) -> None:
    """A run ends with the first step after its time is over; a step takes less than 2 seconds."""
    rows = {(row["importance"], row["training"]): row for row in finding.rows}
    healed = rows["activation", "distilled"]["minutes"]
    fresh = rows["random weights", "equal minutes"]["minutes"]
    assert healed - 1 / 60 <= fresh <= healed + 3 / 60


def test_both_panels_mark_the_whole_model(finding: Finding) -> None:
    whole = shipped("whole", "none", "none")[0]
    assert finding.chart is not None
    cut, trained = finding.chart.panels
    assert isinstance(cut, Panel) and isinstance(trained, Panel)
    assert cut.marks == trained.marks == (whole,)
    assert [curve.label for curve in cut.curves] == ["activation", "magnitude", "random"]
    for curve in cut.curves:
        drawn = [
            sum(found.values()) / len(found)
            for found in (shipped(str(model), curve.label, "none") for model in curve.xs)
        ]
        assert list(curve.ys) == pytest.approx(drawn)
    (points,) = trained.curves
    assert points.ys[0] == shipped(HEALED, "activation", "none")[0]
    assert len(points.xs) == 5
