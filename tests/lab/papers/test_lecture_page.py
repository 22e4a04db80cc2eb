"""The table of the lecture's sections in docs/papers.md: it is whole, and every command in it
runs."""

import re
from pathlib import Path

import pytest

from nanoserve.commands.main import main
from nanoserve.lab.papers.framework import load_paper

PAGE = Path(__file__).parents[3] / "docs/papers.md"
SECTIONS = [
    *("1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7"),
    *("2.1.1", "2.1.2", "2.1.3", "2.1.4", "2.2.1", "2.2.2", "2.2.3"),
    *("2.3.1", "2.3.2", "2.3.3", "2.4.1", "2.4.2"),
    *("3.1.1", "3.1.2", "3.1.3", "3.1.4", "3.1.5", "4.1", "4.2"),
]
"""The sections of the lecture that have no sections of their own."""
MEASURED = {figure.number for figure in load_paper("lecture").figures if figure.measured}
"""Figures that take long: they run a model."""


def rows() -> dict[str, str]:
    """The last cell of each row of the table, by the first."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("| section | in nanoserve | command |\n|---|---|---|\n")[2]
    table = table.partition("\n\n")[0]
    found = dict[str, str]()
    for line in table.splitlines():
        section, _, command = line.strip("| ").split(" | ")
        found[section] = command
    return found


def commands() -> list[object]:
    """Every command of the table once; those that run a model are slow tests."""
    words = [one for cell in rows().values() for one in re.findall(r"`([^`]*)`", cell)]
    found = list[object]()
    for command in dict.fromkeys(words):
        marks = []
        if command.rpartition(" ")[2] in MEASURED:
            marks = [pytest.mark.slow]
        found.append(pytest.param(command, id=command, marks=marks))
    return found


def test_every_section_of_the_lecture_has_a_row() -> None:
    named = [number for cell in rows() for number in re.findall(r"\d\.\d(?:\.\d)?", cell)]
    assert named == SECTIONS


def test_a_section_has_a_command_or_the_reason_why_it_has_none() -> None:
    for section, command in rows().items():
        assert "`" in command or command.startswith("none: "), section


def test_every_figure_is_in_the_table() -> None:
    named = {one for cell in rows().values() for one in re.findall(r"--figure ([a-z-]+)`", cell)}
    assert named == {figure.number for figure in load_paper("lecture").figures}


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_table_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = command.replace("…", "nanoserve bench paper lecture").split()
    assert program == "nanoserve"
    if "paper" in words:  # one seed is enough to see that it runs
        words += ["--seeds", "1"]
    assert main(words) == 0
