"""Jobs run once each, in as many processes as there are, with outcomes that do not depend on that."""

import os
from dataclasses import dataclass

import pytest

from nanoserve.papers.cases import Case, System
from nanoserve.papers.running import Runner
from nanoserve.papers.tuning import best, over_seeds, ratio, spread, with_budgets


@dataclass(frozen=True)
class Square:
    number: int

    @property
    def name(self) -> str:
        return f"square {self.number}"

    def run(self) -> tuple[int, int]:
        return self.number**2, os.getpid()


def test_equal_jobs_run_once_and_every_one_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    with Runner(1, lambda *progress: told.append(progress)) as runner:
        runner.run([Square(2), Square(3), Square(2)])
        outcomes = runner.run([Square(3), Square(4)])
    assert [outcomes[Square(number)][0] for number in (2, 3, 4)] == [4, 9, 16]
    assert told == [(1, 2, "square 2"), (2, 2, "square 3"), (1, 1, "square 4")]


def test_outcomes_do_not_depend_on_the_processes() -> None:
    cases = over_seeds(_case(), [0, 1])
    with Runner(1) as alone, Runner(2) as two:
        squares = two.run([Square(2), Square(3)])
        assert os.getpid() not in {process for _, process in squares.values()}
        assert alone.run(cases) == {case: two.run(cases)[case] for case in cases}


def test_what_happens_in_between_ends_the_processes() -> None:
    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Runner(2, interrupt) as runner:
        runner.run([Square(number) for number in range(50)])


def test_every_system_is_tuned_over_the_same_list() -> None:
    cases = with_budgets(_case(), [32, 64])
    assert [case.system.token_budget for case in cases] == [32, 64]
    assert best(cases, lambda case: -case.system.token_budget) == (cases[0], -32)
    with Runner(1) as runner:
        outcomes = runner.run(cases)
    small, large = ([outcomes[case].steady.step_tokens] for case in cases)
    assert spread(cases[:1], outcomes, lambda one: one.steady.step_tokens).mean == small[0] < large[0]
    assert ratio(cases, cases, outcomes, lambda one: one.steady.step_tokens).high == 1


def _case() -> Case:
    return Case(
        system=System(label="any", policy="throttling"),
        model="qwen3-0.6b",
        machine="l4",
        devices=2,
        lengths="30+20",
        requests=200,
        steady=(0.2, 0.8),
    )
