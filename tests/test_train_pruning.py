"""The script that makes the data of figure pruning: it goes on where it was, and writes the data."""

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.lab.papers.pruned_perplexity import shipped_perplexities
from nanoserve.models.loading import load_model, read_tensors

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import train_pruning
from train_pruning import (
    DATA,
    HEALED,
    SEEDS,
    STORYTELLER,
    PruningRun,
    equally_long_runs,
    first_runs,
    magnitudes,
    read_texts,
    to_csv,
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory of data with few stories."""
    directory = tmp_path / "data"
    directory.mkdir()
    story = "Once upon a time, a little dog went to the park with a big red ball."
    (directory / "tinystories_train_subset.txt").write_text(
        "<|endoftext|>".join([f"{story} {place} times." for place in range(40)])
    )
    pieces = [f"{story} The day was {place}." for place in range(30)]
    (directory / "tinystories_valid_subset.txt").write_text("\n\n".join(pieces))
    return directory


def test_texts_are_whole_rows_and_pieces(texts: Path) -> None:
    found = read_texts(texts)
    assert found.training.shape[1] == train_pruning.ROW
    assert found.training[0, 0] == 0  # every story begins with the start token
    assert int((found.training == 0).sum()) >= 2
    assert [int(piece[0]) for piece in found.validation] == [0, 0]  # pieces 0 and 24 of 30


def test_a_run_that_is_there_is_not_made_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def result(run: PruningRun) -> dict[str, Any]:
        made.append(run)
        return {**run._asdict(), "texts": "", "directory": "", "perplexity": 12.3456}

    monkeypatch.setattr(PruningRun, "_result", result)
    run = PruningRun("whole", "none", "none", 0, texts, tmp_path)
    assert run.run() == run.run()
    other = PruningRun(HEALED, "none", "next tokens, equal time", 1, texts, tmp_path, 2.5)
    assert other.run()["seconds"] == 2.5
    assert made == [run, other]
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_training_goes_as_the_run_says(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of two rows of 16 tokens. Random weights know nothing: all of the 4,096 tokens are
    about as likely."""
    shorter = {"ROW": 16, "ROWS": 2, "TOKENS": 64, "CALIBRATING_ROWS": 1, "LONGEST": 16}
    for name, value in shorter.items():
        monkeypatch.setattr(train_pruning, name, value)
    threads = torch.get_num_threads()
    found = {
        (importance, training): PruningRun(
            HEALED, importance, training, 0, texts, tmp_path, seconds
        ).run()
        for importance, training, seconds in (
            ("activation", "none", None),
            ("activation", "distilled", None),
            ("none", "next tokens", None),
            ("none", "next tokens, equal time", 1e-9),
        )
    }
    torch.set_num_threads(threads)
    parameters = {result["parameters"] for result in found.values()}
    # embedding and final norm; in each of 4 layers 2 norms, attention and feed-forward part
    layer = 2 * 256 + 256 * 32 * (8 + 4 + 4 + 8) + 3 * 256 * 384
    assert parameters == {4096 * 256 + 256 + 4 * layer}
    assert [result["tokens"] for result in found.values()] == [0, 64, 64, 32]
    assert found["activation", "distilled"]["seconds"] > 0
    assert found["activation", "none"]["perplexity"] < 100
    assert found["none", "next tokens"]["perplexity"] > 1000


def test_magnitudes_are_the_norms_of_all_weights_that_leave() -> None:
    decoder, config = load_model(STORYTELLER, "float32")
    found = magnitudes(decoder)
    stored = {name: tensor.float() for name, tensor in read_tensors(STORYTELLER).items()}
    layer = {
        name.removeprefix("model.layers.2."): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.2.")
    }
    gate, up = layer["mlp.gate_proj.weight"][7], layer["mlp.up_proj.weight"][7]
    neuron = torch.cat((gate, up, layer["mlp.down_proj.weight"][:, 7])).norm()
    torch.testing.assert_close(found.neurons[2, 7], neuron)
    rows = slice(3 * config.head_dim, 4 * config.head_dim)
    queries = slice(6 * config.head_dim, 8 * config.head_dim)
    group = [
        layer["self_attn.q_proj.weight"][queries],
        layer["self_attn.k_proj.weight"][rows],
        layer["self_attn.v_proj.weight"][rows],
        layer["self_attn.o_proj.weight"][:, queries],
    ]
    torch.testing.assert_close(
        found.groups[2, 3], torch.cat([one.flatten() for one in group]).norm()
    )
    channel = []
    for name, tensor in stored.items():
        if "norm" not in name and name != "lm_head.weight":
            down = name.endswith(("o_proj.weight", "down_proj.weight"))
            channel.append(tensor[9] if down else tensor[:, 9])
    torch.testing.assert_close(found.hidden[9], torch.cat(channel).norm())


def test_equal_time_is_that_of_healing_with_the_same_seed(tmp_path: Path) -> None:
    outcomes = {run: {"seconds": 10.0 + run.seed} for run in first_runs(tmp_path, tmp_path)}
    runs = equally_long_runs(outcomes, tmp_path, tmp_path)
    assert [(run.seed, run.seconds) for run in runs] == [(seed, 10.0 + seed) for seed in SEEDS]


def test_the_data_has_a_row_for_each_run() -> None:
    result = {
        "model": "whole",
        "importance": "none",
        "training": "none",
        "seed": 0,
        "parameters": 100,
        "tokens": 0,
        "seconds": 9.6,
        "perplexity": 11.75984,
    }
    (row,) = csv.DictReader(to_csv([result]).splitlines())
    assert (row["seconds"], row["perplexity"]) == ("10", "11.76")


def test_the_shipped_file_is_of_these_columns_and_runs(tmp_path: Path) -> None:
    with DATA.open(encoding="utf-8", newline="") as table:
        assert csv.DictReader(table).fieldnames == [*train_pruning.COLUMNS]
    kinds = [(one.model, one.importance, one.training, one.seed) for one in shipped_perplexities()]
    runs = first_runs(tmp_path, tmp_path)
    wanted = [(run.model, run.importance, run.training, run.seed) for run in runs]
    wanted += [(HEALED, "none", "next tokens, equal time", seed) for seed in SEEDS]
    assert kinds == wanted
