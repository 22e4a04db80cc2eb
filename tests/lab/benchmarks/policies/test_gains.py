"""Steps without prompts, what host sequences gained in them, and how that compares with the closed
forms."""

import pytest

from nanoserve.lab.benchmarks.policies.gains import (
    DecodeStep,
    decode_only,
    decode_steps,
    device_slowness,
    gains,
    host_rate,
)
from nanoserve.lab.benchmarks.policies.metrics import step_counts
from nanoserve.record.events import Arrived, Collected, Gained
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, SamplingParams, Sequence, SequenceUpdate
from nanoserve.scheduler.optional import (
    CohortProgress,
    HostPlan,
    HostResult,
    HostRow,
    HostWork,
    Swap,
)
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.work import Strategy
from tests.fakes.linear_predictor import LinearPredictor
from tests.record.planned import planned

LAYERS = 3


def _device(sequence: int, start: int, tokens: int = 1) -> Row:
    return Row(sequence, start, (0,) * tokens, sample=True)


def _host(sequence: int, start: int, tokens: int = 1, sub_batch: int = 0) -> Row:
    return Row(sequence, start, (0,) * tokens, sample=True, host=HostRow(sub_batch))


PLANS = [
    StepPlan(0, rows=(_device(0, 0, 4), _device(1, 0, 6))),
    StepPlan(1, rows=(_device(0, 4),), host=HostPlan(swaps=(Swap(0, 1, "out", (1, 2), (1, 2)),))),
    StepPlan(2, rows=(_device(0, 5), _host(1, 6)), host=HostPlan(strategy="overlap")),
    StepPlan(3, rows=(_device(0, 6),), host=HostPlan(strategy="overlap")),
    StepPlan(4, rows=(_device(0, 7), _host(1, 6, tokens=0)), host=HostPlan(strategy="asymmetric")),
    StepPlan(5, rows=(_host(1, 7),), host=HostPlan(strategy="asymmetric")),
    StepPlan(
        6, rows=(_device(0, 8), _host(1, 8, sub_batch=1)), host=HostPlan(strategy="asymmetric")
    ),
    StepPlan(7, host=HostPlan(swaps=(Swap(1, 1, "in", (1, 2), (1, 2)),))),
    StepPlan(8, rows=(_device(0, 9),)),
]
RESULTS = [
    StepResult(0, (Answer(0, (0,)), Answer(1, (0,))), seconds=9.0),
    StepResult(1, (Answer(0, (0,)),), host=HostResult(swapped=(0,)), seconds=3.0),
    StepResult(
        2, (Answer(0, (0,)),), host=HostResult(cohorts=(CohortProgress(2, 0),)), seconds=4.0
    ),
    StepResult(
        3, (Answer(0, (0,)),), host=HostResult(cohorts=(CohortProgress(2, 1),)), seconds=5.0
    ),
    StepResult(4, (Answer(0, (0,)), Answer(1, (0,))), seconds=6.0),
    StepResult(5, (Answer(1, (0,)),), seconds=7.0),
    StepResult(6, (Answer(0, (0,)), Answer(1, (0,))), seconds=8.0),
    StepResult(None, host=HostResult(swapped=(1,))),
    StepResult(8, (Answer(0, (0,)),), seconds=3.5),
]


def _run() -> RunRecord:
    results = [
        Collected(float(time), float(time), (result,)) for time, result in enumerate(RESULTS)
    ]
    return RunRecord(1, [*(planned(plan, 0.0) for plan in PLANS), *results])


def test_every_sampled_row_begins_a_token() -> None:
    record = _run()
    for number in (0, 1):
        request = Request(str(number), (0,), SamplingParams(), seed=0)
        update = SequenceUpdate(request.request_id, 0, (0,), Sequence(number, request, 0, [0]))
        record.events += [Arrived(0.0, request), Gained(0.0, (update,))]
    assert record.tiers == [["device"] * 7, ["device", "host", "host", "host"]]


def test_steps_by_strategy_without_those_of_swaps_alone() -> None:
    assert step_counts(PLANS) == {"device": 3, "asymmetric": 3, "overlap": 2}


def test_a_pass_through_layers_is_a_part_of_a_token() -> None:
    steps = list(decode_steps(_run(), LAYERS))
    assert [(step.strategy, step.seconds, step.keys) for step in steps] == [
        ("device", 3.0, 5),
        ("overlap", 4.0, 6),
        ("overlap", 5.0, 7),
        ("asymmetric", 6.0, 8),
        ("asymmetric", 8.0, 9),
        ("device", 3.5, 10),
    ], "neither prompts nor host sequences alone"
    assert [step.host_tokens for step in steps] == [0, 1 / 4, 1 / 4, 1 / 2, 1, 0]
    assert sum(step.host_tokens for step in steps[1:4]) == 1, (
        "the first token on the host, begun and finished"
    )
    assert [step.host_sequences for step in steps] == [1, 1, 1, 1, 1, 0], (
        "from its way there until its way back"
    )


PREDICTOR = LinearPredictor(num_layers=LAYERS, linear=0.5, key=0.125, overhead=0.75)
"""A layer of a step with 2 keys takes 0.5, 0.25 of its overhead, and 0.25 of attention: a
second."""


def _step(
    strategy: Strategy, seconds: float, host_tokens: float, host_sequences: int = 4
) -> DecodeStep:
    return DecodeStep(strategy, seconds, 2, 2, host_sequences, host_tokens)


def test_slowness_is_that_of_the_device_alone() -> None:
    steps = [_step("device", seconds, 0.0) for seconds in (3.0, 6.0, 30.0)] + [
        _step("overlap", 300.0, 1.0)
    ]
    assert device_slowness(steps, PREDICTOR) == 2.0
    assert device_slowness(steps[3:], PREDICTOR) is None


def test_the_cpus_rate_is_in_sequences_of_a_layer() -> None:
    assert host_rate([HostWork(4, 100, 2.0), HostWork(2, 60, 1.0)]) == 2.0
    assert host_rate([]) is None


def test_gains_are_worked_by_hand() -> None:
    steps = [_step("overlap", 6.0, 0.5), _step("overlap", 8.0, 1.0), _step("asymmetric", 9.0, 2.0)]
    found = gains(steps, PREDICTOR, slowness=2.0, rate=0.5)
    # Alone a step takes 6 s. The CPU computes one sequence's layer in the 2 s of a layer: half of
    # two decodes. But four host sequences have one token in four steps together: 0.5 again.
    assert found["overlap"] == {
        "steps": 2,
        "gain": pytest.approx((1.25 * 6 + 1.5 * 6) / 14 - 1),
        "bound": 0.5,
        "reached": pytest.approx(0.1786 / 0.5, rel=1e-3),
    }
    # NC / NG = 0.5 * 0.5 / 2; (1 + 2 Tlin / Tgatt) = 5; (1 + 0.625) * 2 / 3 - 1: the overhead is
    # there once
    asymmetric = found["asymmetric"]
    assert asymmetric is not None
    assert asymmetric["gain"] == pytest.approx(2 * 6 / 9 - 1)
    assert asymmetric["bound"] == pytest.approx(1.625 * 2 / 3 - 1)


def test_decode_only_figures_are_means_over_time() -> None:
    steps = [
        _step("device", 3.0, 0.0, host_sequences=0),
        _step("overlap", 6.0, 0.5),
        _step("asymmetric", 1.0, 2.0),
    ]
    assert decode_only(steps) == {
        "tokens_per_s": pytest.approx((2 + 2.5 + 4) / 10),
        "residents": pytest.approx((0 * 3 + 2 * 6 + 2 * 1) / 10),
    }
    assert decode_only([]) is None


def test_there_is_nothing_to_hold_without_work_of_the_cpu() -> None:
    assert (
        gains([_step("overlap", 6.0, 0.5)], PREDICTOR, slowness=1.0, rate=None)["overlap"] is None
    )
    assert gains([], PREDICTOR, slowness=1.0, rate=1.0)["asymmetric"] is None


def test_of_a_bound_that_is_a_loss_nothing_is_reached() -> None:
    found = gains(
        [_step("asymmetric", 9.0, 0.0, host_sequences=0)], PREDICTOR, slowness=1.0, rate=1.0
    )["asymmetric"]
    assert found is not None and found["bound"] is not None
    assert found["bound"] < 0 and found["reached"] is None
