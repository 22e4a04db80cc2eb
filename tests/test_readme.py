"""The README promises what is there: sizes, simulated figures, pictures, and cells that are read at a glance."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanoserve.papers.gllm.code_size import rooms
from scripts.pictures import COMMAND, QUESTION, animation, schedules

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PICTURES = ROOT / "docs" / "pictures"
TOLERANCE = 2_000  # lines that the code may gain or lose before a figure is written anew


def test_no_cell_of_a_table_is_longer_than_fifteen_words() -> None:
    for row in re.findall(r"^\|(.*)\|$", README, flags=re.MULTILINE):
        for cell in row.split("|"):
            shown = re.sub(r"\]\([^)]*\)", "", cell)
            assert len(shown.split()) <= 15, cell


def test_the_numbers_of_lines_are_right() -> None:
    scheduler, whole = (int(number.replace(",", "")) for number in re.findall(r"about\s+([\d,]+) lines", README))
    sizes = rooms()
    assert abs(whole - sum(size.lines for name, size in sizes.items() if name.startswith("nanoserve"))) <= TOLERANCE
    assert abs(scheduler - sizes["nanoserve/scheduler"].lines) <= TOLERANCE / 10


def test_the_simulated_figure_is_what_the_simulator_says() -> None:
    command = "nanoserve simulate --policy sarathi,throttling --rate 3 --requests 200"
    assert command in README
    assert schedules.__doc__ is not None and command in schedules.__doc__
    gaps = [int(re.findall(r"p99 gap between tokens (\d+) ms", panel.title)[0]) for panel in schedules().panels]
    assert f"**{gaps[1] / gaps[0]:.2f} times the gap between tokens**" in README


@pytest.mark.parametrize("name", ["chat.svg", "schedule.png"])
def test_a_picture_is_shown_and_small(name: str) -> None:
    assert f"](docs/pictures/{name})" in README
    assert (PICTURES / name).stat().st_size < (60_000 if name.endswith("svg") else 120_000)


def test_the_chat_is_the_one_that_the_script_records() -> None:
    root = ElementTree.parse(PICTURES / "chat.svg").getroot()
    texts = ["".join(element.itertext()) for element in root if element.tag.endswith("text")]
    assert texts[0] == f"$ {COMMAND}"
    assert QUESTION.replace(" ", "") in "".join(texts)  # it was typed letter by letter


def test_pieces_of_an_animation_come_and_go_at_their_times() -> None:
    first = {(0, 0): ("a", ""), (0, 1): ("b", "")}
    drawn = animation([(0.0, {}), (1.0, first), (2.0, {(0, 0): ("a", "")})])
    texts = {"".join(element.itertext()): element for element in ElementTree.fromstring(drawn)[3:]}
    assert {letter: element[0].get("keyTimes") for letter, element in texts.items()} == {
        "a": "0.0000;0.1250",
        "b": "0.0000;0.1250;0.2500",
    }
