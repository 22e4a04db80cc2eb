"""The README promises what is there: sizes, simulated figures, pictures, and cells that are read at a glance."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.papers.gllm.code_size import rooms
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.policies.token_throttling import TokenThrottling
from scripts.pictures import COMMAND, QUESTION, animation, schedules

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
POLICY = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "(Policy)" in block)
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
    assert abs(scheduler - sizes["nanoserve/scheduler"].lines) <= TOLERANCE / 4


@given(
    st.builds(
        Load,
        previous=st.none(),
        waiting_tokens=st.integers(0, 30_000),
        first_waiting_tokens=st.integers(0, 4_000),
        running_decodes=st.integers(0, 300),
        ready_decodes=st.integers(0, 300),
        ready_prefills=st.integers(0, 2),
        context_tokens=st.just(0),
        free_blocks=st.integers(0, 1_000),
        total_blocks=st.just(1_000),
        block_size=st.just(16),
        free_slots=st.just(256),
        steps_in_flight=st.integers(0, 1),
        pipeline_depth=st.integers(1, 4),
    )
)
def test_the_policy_of_twelve_lines_decides_as_token_throttling(load: Load) -> None:
    assert len([line for line in POLICY.splitlines() if line]) <= 12
    defined: dict[str, Any] = {}
    exec(POLICY, defined)
    assert defined["Mine"]().decide(load) == TokenThrottling().decide(load)


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
