"""Predicted times, as policies get them, against times of the simulator."""

from dataclasses import replace

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import Efficiency, Machine, load_machine
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.layout import ParallelLayout
from tests.costs.conftest import tiny_model

A10 = StepCosts(load_shape("llama-3.1-8b"), load_machine("apex-a10"), ParallelLayout())


@pytest.mark.parametrize(("rows", "context"), [(1, 1000), (32, 500), (64, 1500), (200, 300)])
def test_a_predicted_decode_step_takes_what_it_takes_in_the_simulator(
    rows: int, context: int
) -> None:
    predictor = CostPredictor(A10)
    work = A10.work([context] * rows)
    layer = predictor.linear_seconds(rows) + predictor.attention_seconds(rows * context)
    predicted = predictor.num_layers * layer + predictor.step_overhead_seconds()
    assert predicted == pytest.approx(A10.step_seconds(work), rel=0.02)


def test_a_predicted_prompt_takes_a_few_percent_more_than_in_the_simulator() -> None:
    predictor = CostPredictor(A10)
    layer = predictor.linear_seconds(1500) + predictor.prefill_attention_seconds(1500)
    predicted = predictor.num_layers * layer + predictor.step_overhead_seconds()
    taken = A10.step_seconds(A10.work([], [(0, 1500)]))
    assert taken < predicted < 1.06 * taken


def test_the_hosts_part_is_that_of_the_costs(machine: Machine) -> None:
    two = StepCosts(
        tiny_model(num_layers=3),
        machine,
        ParallelLayout(pipeline_parallel=2),
        efficiency=Efficiency(),
    )
    one = StepCosts(tiny_model(num_layers=3), machine, efficiency=Efficiency())
    predictor = CostPredictor(two, (two, one))
    assert predictor.host_attention_seconds(3, 50) == two.host_attention_seconds(
        50
    ) + two.host_exchange_seconds(3)
    assert predictor.swap_seconds(10) == two.swap_seconds(10, 0) > two.swap_seconds(10, 1)
    assert predictor.transition_seconds(0) == max(two.reload_seconds(0), two.reload_seconds(1))
    assert predictor.transition_seconds(1) == one.reload_seconds(0)


def test_the_slowest_stage_is_the_one_with_the_head(machine: Machine) -> None:
    model = tiny_model(num_layers=2)
    costs = StepCosts(
        model, machine, ParallelLayout(pipeline_parallel=2), efficiency=Efficiency.ideal()
    )
    first, last = (costs.stage_seconds(costs.work([1]), stage) for stage in range(2))
    assert (
        CostPredictor(costs).slowest_share == pytest.approx(last / (first + last)) and first < last
    )
    assert CostPredictor(StepCosts(model, machine)).slowest_share == 1.0


def test_nothing_takes_no_time() -> None:
    predictor = CostPredictor(A10)
    assert (
        predictor.linear_seconds(0)
        == predictor.attention_seconds(0)
        == predictor.prefill_attention_seconds(0)
        == 0
    )


def test_a_processor_attends_for_all_devices_of_a_stage() -> None:
    model, machine = (
        load_shape("llama-3.1-8b"),
        replace(load_machine("apex-a10"), devices_per_node=2),
    )
    two = StepCosts(model, machine, ParallelLayout(tensor_parallel=2))
    assert two.host_attention_seconds(1000) == A10.host_attention_seconds(1000)
    assert two.host_exchange_seconds(10) < A10.host_exchange_seconds(10)  # over two links
