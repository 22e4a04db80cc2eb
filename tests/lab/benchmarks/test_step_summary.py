"""Shares and rates of steps whose shape and duration are known."""

import pytest

from nanoserve.lab.benchmarks.driving import EngineDriver, StepRecord, summarize_steps
from nanoserve.lab.benchmarks.floors import Limits, ModelCost
from nanoserve.models.hub import dummy_config
from nanoserve.scheduler.work import StepWork
from tests.lab.benchmarks.fakes import VirtualExecutor, virtual_engine

COST, LIMITS = ModelCost(dummy_config("smollm2-135m"), 2), Limits(1e9, 1e11)
DECODE, PREFILL = StepWork.of([10]), StepWork.of(chunks=[(0, 1000)])


def record(work: StepWork, *, times_floor: float, in_executor: float) -> StepRecord:
    seconds = times_floor * COST.floor_seconds(work, LIMITS)
    return StepRecord(work, in_executor * seconds, seconds)


def test_each_kind_of_step_has_its_own_shares() -> None:
    steps = [record(DECODE, times_floor=4, in_executor=0.75)] * 2 + [
        record(PREFILL, times_floor=2, in_executor=0.9)
    ]
    found = summarize_steps(steps, COST, LIMITS)
    assert set(found) == {"decode", "prefill", "all"}
    decode, prefill = found["decode"], found["prefill"]
    assert (decode.steps, prefill.steps, found["all"].steps) == (2, 1, 3)
    assert decode.of_floor == pytest.approx(0.25)
    # a quarter of 1 GB/s, as reading bounds a decode
    assert decode.read_gb_per_s == pytest.approx(0.25)
    assert decode.engine_share == pytest.approx(0.25)
    assert decode.engine_ms == pytest.approx(1000 * COST.floor_seconds(DECODE, LIMITS))
    assert prefill.of_floor == pytest.approx(0.5)
    assert prefill.gflops == pytest.approx(50)  # half of 100 GFLOP/s, as computing bounds a prefill
    assert prefill.engine_share == pytest.approx(0.1)
    assert 0.25 < found["all"].of_floor < 0.5


def test_a_short_step_weighs_less_than_a_long_one() -> None:
    steps = [record(DECODE, times_floor=factor, in_executor=1.0) for factor in (1, 9)]
    found = summarize_steps(steps, COST, LIMITS)["decode"]
    assert found.of_floor == pytest.approx(2 / 10)
    assert found.step_of_floor is not None and found.step_of_floor.max == pytest.approx(1.0)


def test_prompts_beside_decoding_sequences_are_mixed_steps() -> None:
    """With a budget of 8 tokens, the second prompt is still being read while the first request
    decodes."""
    run = EngineDriver(virtual_engine(VirtualExecutor(), budget=8)).run(
        [(1, 2), tuple(range(20))], [4, 2]
    )
    found = summarize_steps(run.steps, COST, LIMITS)
    assert {kind: found[kind].steps for kind in ("prefill", "mixed")} == {"prefill": 1, "mixed": 2}
    assert found["all"].steps == len(run.steps)
