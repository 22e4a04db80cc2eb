"""A decode step launches no more than the committed table says: counted on the code that torch's
compiler makes for a GPU that is not there."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("launch_counts.csv")
SAMPLING = {"greedy": 1, "temperature": 2, "top_p": 7, "top_k": 4}
"""Most launches of a way to sample."""
LAYERS = {1: 7, 256: 9}
"""Most launches of a layer of Llama and Qwen3, by tokens."""

STEP = {"greedy": 7, "temperature": 8}
"""Most launches of a captured step beside its layers, by its way to sample."""

Counts = dict[tuple[str, int], int]


def read(lines: list[str]) -> Counts:
    return {(row["name"], int(row["size"])): int(row["launches"]) for row in csv.DictReader(lines)}


@pytest.fixture(scope="module")
def counted() -> Counts:
    """Count in a process of its own, which believes in a GPU from then on."""
    command = [sys.executable, "-m", "scripts.launch_counts", "llama", "qwen3", "sampling", "step"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return read(done.stdout.splitlines())


def test_the_table_is_within_what_is_aimed_at() -> None:
    table = read(TABLE.read_text(encoding="utf-8").splitlines())
    for tokens, most in LAYERS.items():
        for family in ("llama", "qwen3"):
            assert table[family, tokens] <= most
    for part, ways in (("sampling", SAMPLING), ("step", STEP)):
        for way, most in ways.items():
            for rows in (1, 256):
                assert table[f"{part}, {way}", rows] <= most


@pytest.mark.slow  # torch's compiler makes six functions
def test_nothing_launches_more_than_the_table_says(counted: Counts) -> None:
    """Where it launches less, the table is to be made anew: counts fall, and do not rise again."""
    table = read(TABLE.read_text(encoding="utf-8").splitlines())
    assert len(counted) == 16
    assert counted == {name: table[name] for name in counted}
