"""The script that trains the models of figure recall: it goes on where it was, and writes the data."""

import csv
import json
from pathlib import Path

import pytest

from nanoserve.lab.papers.associative_recall import Recalled, Trained
from nanoserve.lab.papers.recall_accuracy import shipped_answers
from scripts import train_recall
from scripts.train_recall import DATA, TrainingRun, to_csv


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Notes the models and seeds that would be trained."""
    begun = list[tuple[str, int]]()

    def train(name: str, seed: int, progress: object, steps: int) -> Trained:
        begun.append((name, seed))
        return Trained(
            100, steps * 1152, 9.6, [Recalled(1, 2, 8, 50, 40), Recalled(1, 10, 16, 30, 3)]
        )

    monkeypatch.setattr(train_recall, "train", train)
    return begun


def test_a_run_that_is_there_is_not_made_again(
    trained: list[tuple[str, int]], tmp_path: Path
) -> None:
    first = TrainingRun("hybrid 1:7", 0, tmp_path, steps=5)
    again = [first.run(), first.run(), TrainingRun("hybrid 1:7", 1, tmp_path, steps=5).run()]
    assert trained == [("hybrid 1:7", 0), ("hybrid 1:7", 1)]
    assert again[0] == again[1]
    assert {path.name for path in tmp_path.iterdir()} == {"hybrid-1-7-0.json", "hybrid-1-7-1.json"}
    assert again[2]["tokens"] == 5760
    json.loads((tmp_path / "hybrid-1-7-0.json").read_text())


def test_the_data_has_a_row_for_each_range(trained: list[tuple[str, int]], tmp_path: Path) -> None:
    rows = [
        *csv.DictReader(to_csv([TrainingRun("Mamba", 2, tmp_path, steps=5).run()]).splitlines())
    ]
    assert [
        (row["model"], row["seed"], row["nearest"], row["farthest"], row["right"]) for row in rows
    ] == [
        ("Mamba", "2", "2", "8", "40"),
        ("Mamba", "2", "10", "16", "3"),
    ]
    assert [(row["seconds"], row["chance"]) for row in rows] == [("10", "0.0625")] * 2


def test_the_shipped_file_is_of_these_columns() -> None:
    with DATA.open(encoding="utf-8", newline="") as table:
        assert csv.DictReader(table).fieldnames == [*train_recall.COLUMNS]
    assert shipped_answers()
