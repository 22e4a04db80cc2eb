"""The steady state counts what happens between two moments of progress, each prompt once."""

import pytest
from msgspec.structs import replace

from nanoserve.lab.papers.cases import Case, System
from nanoserve.lab.papers.observers import SteadyWindow
from nanoserve.layout import ParallelLayout
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from tests.record.planned import planned, stage_times


def _case(**changes: object) -> Case:
    settings: dict[str, object] = {
        "system": System(label="any", policy="sarathi", token_budget=64),
        "model": "qwen3-0.6b",
        "machine": "l4",
        "layouts": (ParallelLayout(pipeline_parallel=2),),
        "lengths": "30+20",
        "requests": 400,
    }
    return Case(**(settings | changes))  # type: ignore[arg-type]


def test_the_window_agrees_with_the_whole_run_where_nothing_changes() -> None:
    outcome = _case(steady=(0.1, 0.9)).run()
    whole, steady = outcome.result, outcome.steady
    assert steady.tokens_per_second == pytest.approx(whole.tokens_per_second, rel=0.1)
    assert steady.step_tokens == pytest.approx(64, rel=0.01)
    assert steady.prefill_tokens + steady.decodes == pytest.approx(steady.step_tokens)
    assert 0 <= steady.bubble_share <= whole.bubble_share
    assert steady.seconds < 0.9 * whole.seconds


def test_a_prompt_that_is_computed_again_counts_once() -> None:
    window = SteadyWindow(requests=3, shares=(0.0, 1.0), logged_steps=0)
    params = SamplingParams(temperature=0.0)
    begin = Begin(sequence=7, tokens=(1,) * 10, prompt_length=10, index=0, seed=0, params=params)
    row = Row(sequence=7, start=0, tokens=(1,) * 10, sample=True)
    for second in range(3):  # first token; preempted and computed again; done
        plan = StepPlan(step=second, begin=(begin,), rows=(row,))
        window.on_step(planned(plan, second), stage_times(second, (second, second + 0.5)))
    steady = window.result()
    assert steady.seconds == 2  # from the first step to the last, which is not counted
    assert steady.tokens_per_second * steady.seconds == 10 + 1 + 1
    assert steady.bubble_share == 0.5
    assert steady.step_tokens == steady.prefill_tokens == 10


def test_single_steps_are_kept_from_the_windows_beginning() -> None:
    outcome = _case(steady=(0.5, 0.9), logged_steps=7).run()
    assert len(outcome.log) == 7
    assert all(sample.prompt_tokens + sample.decodes == 64 for sample in outcome.log)
    assert all(len(sample.spans) == 2 for sample in outcome.log)
    assert outcome.log[0].time > 0


def test_a_run_that_ends_with_its_steady_state_measures_the_same_one() -> None:
    case = _case(steady=(0.5, 0.9), logged_steps=7)
    whole, ended = case.run(), replace(case, ends_steady=True).run()
    assert (ended.window, ended.log) == (whole.window, whole.log)
    assert ended.result.requests < whole.result.requests == case.requests


def test_a_window_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="more requests"):
        SteadyWindow(10, (0.5, 0.9), 0).result()
