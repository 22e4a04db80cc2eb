"""One stage on each of two hosts, started by torchrun as a user would."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from scripts.two_hosts import Host, torchrun, wait

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon a time", "The little dog", "Lily and Ben"]
SETTINGS = [
    "--dtype",
    "float32",
    "--kv-cache-memory",
    "64MiB",
    "--threads",
    "1",
    "--eager",
    "-t",
    "0",
    "-n",
    "400",
]
WORKER = "nanoserve.executor.workers.process"
"""In the command line of a worker process."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


@pytest.fixture(scope="module")
def expected(hosts: tuple[Host, Host], prompts: Path) -> list[str]:
    """Answers of one process."""
    results = prompts.parent / "alone.jsonl"
    program = hosts[0].start([sys.executable, *generate(prompts, results)])
    wait([program], 600)
    assert program.returncode == 0, program.messages
    return texts(results)


def generate(prompts: Path, results: Path, *more: str) -> list[str]:
    return [
        "-m",
        "nanoserve",
        "generate",
        "--file",
        str(prompts),
        "--output",
        str(results),
        *SETTINGS,
        *more,
    ]


def texts(results: Path) -> list[str]:
    """By position in the file of prompts."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    return [row["text"] for row in sorted(rows, key=lambda row: row["index"])]


def test_the_tokens_of_two_machines_are_those_of_one_process(
    hosts: tuple[Host, Host], prompts: Path, expected: list[str], tmp_path: Path
) -> None:
    first, second = programs = torchrun(
        hosts, generate(prompts, tmp_path / "results.jsonl", "--pp", "2")
    )
    wait(programs, 180)

    assert (first.returncode, second.returncode) == (0, 0), first.messages + second.messages
    assert texts(tmp_path / "results.jsonl") == expected
    assert "worker 1 of engine 0 on 10.199" in second.messages
    assert not hosts[0].processes() and not hosts[1].processes()


def test_a_whole_engine_on_each_machine_answers_what_one_process_answers(
    hosts: tuple[Host, Host], prompts: Path, expected: list[str], tmp_path: Path
) -> None:
    first, second = programs = torchrun(
        hosts, generate(prompts, tmp_path / "results.jsonl", "--dp", "2")
    )
    wait(programs, 180)

    assert (first.returncode, second.returncode) == (0, 0), first.messages + second.messages
    assert texts(tmp_path / "results.jsonl") == expected
    assert "worker 0 of engine 1 on 10.199" in second.messages
    assert not hosts[0].processes() and not hosts[1].processes()


def test_a_layout_is_chosen_by_what_the_link_between_two_machines_bears(
    hosts: tuple[Host, Host], prompts: Path, expected: list[str], tmp_path: Path
) -> None:
    first, second = programs = torchrun(
        hosts, generate(prompts, tmp_path / "results.jsonl", "--parallel", "auto")
    )
    wait(programs, 180)

    assert (first.returncode, second.returncode) == (0, 0), first.messages + second.messages
    assert re.search(r"[PT]2.* with \w+: predicted [\d,]+ tokens/s; next ", first.messages), (
        first.messages
    )
    assert texts(tmp_path / "results.jsonl") == expected


def test_a_worker_that_is_killed_on_the_other_machine_is_replaced(
    hosts: tuple[Host, Host], expected: list[str]
) -> None:
    command = ["-m", "nanoserve", "generate", PROMPTS[0], *SETTINGS, "--pp", "2"]
    first, second = programs = torchrun(hosts, command)
    end = time.monotonic() + 240
    while not first.output:  # the answer has begun, and goes on for hundreds of tokens
        assert time.monotonic() < end, first.messages + second.messages
        time.sleep(0.05)
    (worker,) = hosts[1].processes(WORKER)
    os.kill(worker, signal.SIGKILL)
    wait(programs, 180)

    assert (first.returncode, second.returncode) == (0, 0), first.messages + second.messages
    assert first.output.rstrip("\n") == expected[0].rstrip("\n")
    assert "worker 1 failed: its process was killed by SIGKILL on" in first.messages
    assert not hosts[0].processes() and not hosts[1].processes()


def test_unequal_versions_are_one_clear_line_on_both_sides(
    hosts: tuple[Host, Host], prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import nanoserve\nnanoserve.__version__ = '9.9.9'\n"
    )
    other = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    programs = torchrun(
        hosts, generate(prompts, tmp_path / "results.jsonl", "--pp", "2"), ({}, other)
    )
    wait(programs, 600)

    for program in programs:
        (line,) = [line for line in program.messages.splitlines() if line.startswith("nanoserve: ")]
        assert line.startswith("nanoserve: unequal versions: nanoserve ")
        assert "nanoserve 9.9.9" in line
        assert program.returncode != 0


def test_when_the_first_machine_fails_nothing_is_left_on_the_other(
    hosts: tuple[Host, Host], prompts: Path, tmp_path: Path
) -> None:
    _, second = programs = torchrun(
        hosts, generate(prompts, tmp_path / "results.jsonl", "--pp", "2")
    )
    end = time.monotonic() + 240
    while not hosts[1].processes(WORKER):
        assert time.monotonic() < end, second.messages
        time.sleep(0.1)
    for process in hosts[0].processes():
        os.kill(process, signal.SIGKILL)
    wait(programs, 60)

    assert second.returncode != 0
    assert (
        "nanoserve: torchrun's store is gone: the command has ended on the first machine"
        in second.messages
    )
    assert not hosts[1].processes()
