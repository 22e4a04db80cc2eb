"""One stage on each of two hosts, started by torchrun as a user would."""

import json
import sys
from pathlib import Path

import pytest

from tests.multi_node.hosts import torchrun, two_hosts, wait

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon a time", "The little dog", "Lily and Ben"]
SETTINGS = ["--dtype", "float32", "--kv-cache-memory", "64MiB", "--threads", "1", "-t", "0", "-n", "40", "--eager"]


def texts(results: Path) -> list[str]:
    """By position in the file of prompts."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [row["text"] for row in sorted(rows, key=lambda row: row["index"])]


def generate(prompts: Path, results: Path, *more: str) -> list[str]:
    return ["-m", "nanoserve", "generate", "--file", str(prompts), "--output", str(results), *SETTINGS, *more]


def test_the_tokens_of_two_machines_are_those_of_one_process(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    with two_hosts() as hosts:
        alone = hosts[0].start([sys.executable, *generate(prompts, tmp_path / "alone.jsonl")])
        wait([alone], 120)
        first, second = programs = torchrun(hosts, generate(prompts, tmp_path / "together.jsonl", "--pp", "2"))
        wait(programs, 180)

    assert (alone.code, first.code, second.code) == (0, 0, 0), alone.errors + first.errors + second.errors
    assert texts(tmp_path / "together.jsonl") == texts(tmp_path / "alone.jsonl")
    assert "worker 1 of 0 to 1, for the engine on 10.199" in second.errors
