"""The picture of a simulation: what it shows, and the window of steps it looks through."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from nanoserve.lab.charts import draw, draw_figure
from nanoserve.lab.commands.simulate import PlottedRun, simulation_chart
from nanoserve.lab.simulator import Workload, fixed_lengths, poisson_arrivals, simulate
from nanoserve.lab.step_window import WINDOW_STEPS, StepWindow
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Row, StepPlan
from tests.lab.simulator.linear_times import LinearTimes
from tests.record.planned import planned, stage_times


def _window(steps: int, stages: int = 3) -> StepWindow:
    """A window of steps that take a second in each stage, one entering every second."""
    window = StepWindow()
    for step in range(steps):
        spans = [(step + stage, step + stage + 1) for stage in range(stages)]
        plan = StepPlan(step, rows=(Row(0, 6, (1,), True), Row(1, 0, (1, 1, 1), True)))
        window.on_step(planned(plan, step), stage_times(step, *spans))
    return window


@pytest.mark.parametrize("steps", [100, 1000, 12_345])
def test_the_window_lies_in_the_midst_of_a_run(steps: int) -> None:
    numbers = [step.step for step in _window(steps).steps]
    assert numbers == list(range(numbers[0], numbers[0] + WINDOW_STEPS + 3))
    assert steps / 5 < numbers[0] < steps / 2


def test_all_stages_are_seen_all_through_the_span() -> None:
    window = _window(1000)
    first = window.steps[0].step
    # from the last stage's first to the first one's last
    assert window.span == (first + 2, first + WINDOW_STEPS + 3)


def test_another_run_is_shown_at_the_same_time_with_all_steps_of_it() -> None:
    first = _window(1000)
    begin, end = first.span
    beside = StepWindow(beside=first)
    for step in range(2000):  # half a second in each of two stages
        plan = StepPlan(step, rows=(Row(0, 6, (1,), True),))
        beside.on_step(
            planned(plan, step / 2),
            stage_times(step, (step / 2, step / 2 + 0.5), (step / 2 + 0.5, step / 2 + 1)),
        )
    assert beside.span == first.span
    spans = [
        span for step in beside.steps for span in step.spans if span[0] < end and span[1] > begin
    ]
    # no stage is idle
    assert sum(min(right, end) - max(left, begin) for left, right in spans) == 2 * (end - begin)
    assert beside.gantt("a title").end == end - begin


def test_a_short_run_is_shown_whole() -> None:
    window = _window(5)
    assert [step.step for step in window.steps] == [0, 1, 2, 3, 4]
    assert window.span == (0, 7)
    assert window.steps[0].decodes == 1
    assert window.steps[0].prompt_tokens == 3


def _run(policy: str, requests: int = 60, **settings: object) -> PlottedRun:
    window, times = StepWindow(), LinearTimes(num_stages=2, step=0.01, prompt_token=0.0005)
    workload = Workload(poisson_arrivals(8.0, seed=1), fixed_lengths(50, 20), requests)
    result = simulate(
        make_policy(policy, 64), times, workload, num_blocks=100, observers=[window], **settings
    )
    return PlottedRun(policy, result, window)


def test_every_policy_has_a_row_and_every_tier_a_line() -> None:
    runs = [_run("sarathi"), _run("throttling"), _run("throttling", replicas=2)]
    figure = draw_figure(simulation_chart("a title", runs))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[1::2][:3] == [f"{run.policy}: tokens of each step" for run in runs]
    assert [title.partition(":")[0] for title in titles[:6:2]] == [run.policy for run in runs]
    kv = figure.axes[-1]
    assert titles[-1] == "KV cache in use"
    assert [line.get_label() for line in kv.get_lines()] == ["sarathi", "throttling", "throttling"]
    highest = max(kv.get_lines()[0].get_ydata())
    assert highest == pytest.approx(100 * runs[0].result.kv_peak)
    assert all(
        axes.get_xlabel() and (axes.get_ylabel() or axes.get_yticklabels()) for axes in figure.axes
    )


def test_host_memory_is_a_second_line() -> None:
    run = _run("sarathi", requests=5)
    run = replace(
        run, result=msgspec.structs.replace(run.result, host_series=((0.0, 0.0), (1.0, 0.5)))
    )
    lines = draw_figure(simulation_chart("a title", [run])).axes[-1].get_lines()
    assert [(line.get_label(), line.get_linestyle()) for line in lines] == [
        ("sarathi, device", "-"),
        ("sarathi, host", "--"),
    ]
    assert list(lines[1].get_ydata()) == [0, 50]


def test_steps_of_layouts_with_other_stages_and_steps_without_tokens_can_be_drawn() -> None:
    run, window = _run("sarathi", requests=5), StepWindow()
    for step, stages in enumerate((1, 2, 1)):
        spans = [(3 * step + stage, 3 * step + stage + 1) for stage in range(stages)]
        plan = StepPlan(step, rows=(Row(0, 6, (1,), True),) * (2 - step))
        window.on_step(planned(plan, 3 * step), stage_times(step, *spans))
    figure = draw_figure(simulation_chart("a title", [replace(run, window=window)]))
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "stage 0",
        "stage 1",
    ]


def test_a_picture_of_one_request_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    draw(simulation_chart("one", [_run("decode-first", requests=1)]), path)
    assert path.read_bytes().startswith(b"\x89PNG")
