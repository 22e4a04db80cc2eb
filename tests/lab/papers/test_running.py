"""Jobs run once each, in as many processes as there are, with outcomes that do not depend on
that."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanoserve.lab.papers.cases import Case, Runs, System, over_seeds, tuned, with_budget
from nanoserve.lab.papers.running import Runner
from nanoserve.layout import ParallelLayout
from nanoserve.record.metrics import Spread

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@dataclass(frozen=True)
class Square:
    number: int

    def run(self) -> tuple[int, int]:
        return self.number**2, os.getpid()


def test_equal_jobs_run_once_and_every_one_is_told() -> None:
    told: list[tuple[int, int]] = []
    with Runner(1, lambda *progress: told.append(progress)) as runner:
        runner.run([Square(2), Square(3), Square(2)])
        outcomes = runner.run([Square(3), Square(4)])
    assert [outcomes[Square(number)][0] for number in (2, 3, 4)] == [4, 9, 16]
    assert told == [(1, 2), (2, 2), (1, 1)]


def test_outcomes_do_not_depend_on_the_processes() -> None:
    cases = over_seeds(_case(), [0, 1])
    with Runner(1) as alone, Runner(2) as two:
        squares = two.run([Square(2), Square(3)])
        assert os.getpid() not in {process for _, process in squares.values()}
        assert alone.run(cases) == {case: two.run(cases)[case] for case in cases}


def test_what_happens_in_between_ends_the_processes() -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Runner(2, interrupt) as runner:
        runner.run([Square(number) for number in range(50)])


def test_no_process_outlives_a_program_that_is_killed() -> None:
    command = [sys.executable, "-m", "tests.lab.papers.endless"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for _ in range(2):
            assert program.stdout.readline() == "runs\n"
        program.kill()
        rest, _ = program.communicate(timeout=240)  # until the last of them has closed its end
    assert rest == ""


def test_every_case_is_tuned_over_the_same_list() -> None:
    cases = over_seeds(_case(), [0, 1])
    with Runner(1) as runner:
        found = tuned(cases, runner.run, lambda one: -one.steady.step_tokens, budgets=[64, 32])
        runs = Runs(runner.run, {"best": found, "large": [with_budget(case, 64) for case in cases]})
    assert [(case.seed, case.system.token_budget) for case in found] == [(0, 32), (1, 32)]
    best, large = (
        runs.spread(key, lambda one: one.steady.step_tokens) for key in ("best", "large")
    )
    assert best.high < large.low
    assert runs.ratio("best", "best", lambda one: one.steady.step_tokens) == Spread(1, 1, 1)


def _case() -> Case:
    return Case(
        system=System(label="any", policy="throttling"),
        model="qwen3-0.6b",
        machine="l4",
        layouts=(ParallelLayout(pipeline_parallel=2),),
        lengths="30+20",
        requests=100,
        steady=(0.2, 0.8),
    )
