"""The tour's answers are what its exercises print."""

import re
from dataclasses import replace
from types import ModuleType

import pytest

from nanoserve.scheduler.load import Decision
from scripts.exercises import EXERCISES
from tests.scheduler.loads import IDLE
from tests.test_docs import ROOT

PRINTED = {
    1: ["'Hello<|end|>': 1 end tokens"],
    2: ["10 steps"],
    4: ["9 blocks of 16 tokens", "96 of the prompt's tokens"],
    6: ["slots [149, 127, 64, 65]"],
    8: ["'ough E' comes, ('ENough ', None)"],
    10: ["worker 3: stage 1, layers 2 to 3, 4 query heads, 2 key heads, 384 inner columns"],
    13: ["4 groups of 2 layers", "28 blocks, and 16 once"],
    14: ["snapshots at [192, 320, 448]"],
    15: ["512 numbers are kept; attention would keep 8000", "equal to 1e-5 of the largest: True"],
}


@pytest.mark.parametrize("number", PRINTED)
def test_an_exercise_prints_what_the_tour_says(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    EXERCISES[number]()
    printed = capsys.readouterr().out
    assert all(line in printed for line in PRINTED[number]), printed


@pytest.mark.slow
def test_a_token_of_a_host_sequence_takes_a_step_more_than_the_model_has_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    EXERCISES[11]()
    fewest, *_ = capsys.readouterr().out.split()
    assert int(fewest) >= 5, "later is possible: a busy CPU"


def test_the_tour_has_the_plans_of_its_exercise(capsys: pytest.CaptureFixture[str]) -> None:
    EXERCISES[5]()
    assert capsys.readouterr().out in (ROOT / "docs/tour.md").read_text()


def test_the_policy_of_the_tour_decides() -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/tour.md").read_text(), flags=re.DOTALL
    )
    assert len([line for line in code.splitlines() if line]) <= 12, "a dozen lines"
    module = ModuleType("gentle")
    exec(code, module.__dict__)
    gentle = module.__dict__["Gentle"](2048)
    assert gentle.decide(replace(IDLE, ready_decodes=3)) == Decision(256, 3)
    assert gentle.decide(IDLE) == Decision(2048, 0)
