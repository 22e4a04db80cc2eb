"""Forecasts of plans, lessons from their results, and that a replay expects and
learns the same."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.engine.engine import Engine
from nanoserve.lab.simulator.executor import END_TOKEN, VOCAB_SIZE, SimulatedExecutor
from nanoserve.lab.simulator.replay import record_run, replay
from nanoserve.record.events import Corrected, Event, Forecast
from nanoserve.record.forecasts import Forecasts, features_of, learn_from_results
from nanoserve.record.recorder import recorder_of
from nanoserve.request import Request, SamplingParams, Sequence
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.cpu_attention.cohorts import HostCohorts
from nanoserve.scheduler.load import Decision, Policy
from nanoserve.scheduler.optional import (
    Alternative,
    CohortProgress,
    HostPlan,
    HostResult,
    HostRow,
    HostWork,
)
from nanoserve.scheduler.plan import Row, StepPlan, StepResult
from nanoserve.scheduler.policies.apex import ApexAlgorithm1, AsymmetricPipelining
from nanoserve.scheduler.policies.hybrid import HybridByPrediction
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.work import HostBatch, StepFeatures, StepWork
from tests.fakes.linear_predictor import LinearPredictor
from tests.lab.simulator.tier_times import TierTimes
from tests.scheduler.test_hybrid import DECODES, PLAN, hosting
from tests.scheduler.tiered import Bench


class Learner(CorrectedPredictor):
    """A predictor that notes what it is told; every step is predicted to take 7 s."""

    def __init__(self) -> None:
        super().__init__(LinearPredictor())
        self.steps: list[tuple[StepFeatures, float]] = []
        self.works: list[tuple[int, int, float]] = []

    def step_seconds(self, work: StepFeatures) -> float:
        return 7.0

    def observe(self, work: StepFeatures, seconds: float) -> None:
        self.steps.append((work, seconds))

    def observe_host(self, sequences: int, context_tokens: int, seconds: float) -> None:
        self.works.append((sequences, context_tokens, seconds))

    @property
    def corrections(self) -> dict[str, float]:
        return {"steps": float(len(self.steps))}


def on_host(sequence: int, start: int, *, going_on: bool = False, sub_batch: int = 0) -> Row:
    return Row(sequence, start, () if going_on else (1,), True, host=HostRow(sub_batch))


def cohorts_with(*plans: StepPlan) -> HostCohorts:
    """That began in these plans; their sequences have computed 9 tokens each."""
    cohorts = HostCohorts()
    for plan in plans:
        cohorts.follow(plan, {row.sequence: sequence(row.sequence) for row in plan.rows})
    return cohorts


def sequence(number: int) -> Sequence:
    made = Sequence(Request(f"r{number}", (1, 2), SamplingParams(), seed=0), number, 0, [1, 2])
    made.computed = 9
    return made


DEVICE_ROWS = (Row(0, 41, (1,), True), Row(1, 0, (1, 1, 1), True), Row(2, 8, (1, 1), False))
DEVICE_WORK = StepWork(decodes=1, decode_context=42, chunks=((0, 3), (8, 2)), sampled=2)
BEGAN = StepPlan(3, rows=(on_host(5, 8), on_host(6, 8)), host=HostPlan(strategy="overlap"))

# --------------------------------------------------------------------------------------------------
# features


def test_a_step_of_the_device_is_its_rows() -> None:
    assert features_of(StepPlan(0, rows=DEVICE_ROWS)) == StepFeatures(
        strategy="device", device=DEVICE_WORK
    )


def test_cohorts_under_way_are_expected_to_join_beside_those_that_begin() -> None:
    cohorts = cohorts_with(BEGAN)
    cohorts.advance(3, 2)
    plan = StepPlan(4, rows=(*DEVICE_ROWS, on_host(7, 4)), host=HostPlan(strategy="overlap"))
    expected = (HostBatch(1, 5, 0), HostBatch(2, 18, 3))
    assert features_of(plan, cohorts) == StepFeatures(
        strategy="overlap", device=DEVICE_WORK, host=expected
    )


def test_an_asymmetric_step_takes_rows_out_of_their_cohorts_by_how_far_they_are() -> None:
    cohorts = cohorts_with(BEGAN)
    cohorts.advance(3, 1)
    rows = (
        on_host(5, 9, going_on=True),
        on_host(6, 9, going_on=True, sub_batch=1),
        on_host(7, 4, sub_batch=1),
    )
    features = features_of(
        StepPlan(4, rows=(*DEVICE_ROWS, *rows), host=HostPlan(strategy="asymmetric")), cohorts
    )
    assert features.host == (HostBatch(1, 9, 2),)
    assert features.host_second == (HostBatch(1, 9, 2), HostBatch(1, 5, 0))
    assert features.sampled == 5


# --------------------------------------------------------------------------------------------------
# learning


@pytest.mark.parametrize("of_all", [False, True])
def test_once_many_results_were_learned_from_one_in_seventeen_is(of_all: bool) -> None:  # noqa: FBT001
    learner, shown = Learner(), list[Event]()
    forecasts = Forecasts([learner], shown.append)
    forecasts.of_all = of_all
    for step in range(296):
        forecasts.on_plan(StepPlan(step, rows=DEVICE_ROWS), None, Decision(5, 1))
        forecasts.on_result(
            StepResult(step, host=HostResult(work=(HostWork(1, 5, 3.0),)), seconds=3.0)
        )
    assert len(learner.steps) == len(learner.works) == 256 + 40 // 17
    measured = [one.step for one in shown if isinstance(one, Forecast) and one.measured is not None]
    assert measured[256:258] == ([256, 257] if of_all else [271, 288])


def test_a_forecast_is_told_when_its_step_is_planned_and_again_when_it_is_measured() -> None:
    learner, shown = Learner(), list[Event]()
    forecasts = Forecasts([learner], shown.append)
    decision = Decision(5, 1)
    forecasts.on_plan(StepPlan(0, rows=DEVICE_ROWS), None, decision)
    expected = Forecast(0, decision, StepFeatures(strategy="device", device=DEVICE_WORK), 7.0)
    forecasts.on_result(StepResult(None, host=HostResult(swapped=(1,))))
    assert shown == [Corrected({"steps": 0.0}), expected]
    forecasts.on_result(StepResult(0, seconds=3.0))
    assert shown[2:] == [Corrected({"steps": 1.0}), replace(expected, measured=3.0)]
    assert learner.steps == [(expected.work, 3.0)]
    forecasts.on_result(StepResult(0, seconds=3.0))
    assert len(shown) == 4, "a step is measured once"


@pytest.mark.parametrize(
    ("progress", "joined"),
    [
        ([(3, 2), (4, 0)], []),  # the CPU was not done
        ([(3, 3), (4, 0)], [HostBatch(2, 18, 3)]),
        ([(4, 0)], [HostBatch(2, 18, 3)]),  # through: their tokens are answered
    ],
)
def test_who_joined_is_known_behind_the_step(
    progress: list[tuple[int, int]], joined: list[HostBatch]
) -> None:
    learner, cohorts = Learner(), cohorts_with(BEGAN)
    cohorts.advance(3, 2)
    forecasts = Forecasts([learner], cohorts=cohorts)
    plan = StepPlan(4, rows=(*DEVICE_ROWS, on_host(7, 4)), host=HostPlan(strategy="overlap"))
    forecasts.on_plan(plan, None, Decision(5, 1))
    cohorts.follow(plan, {7: sequence(7)})
    cohorts.follow(
        StepPlan(5, rows=(on_host(8, 4),), host=HostPlan(strategy="overlap")), {8: sequence(8)}
    )  # in flight behind it
    forecasts.on_result(
        StepResult(
            4, host=HostResult(cohorts=tuple(CohortProgress(*one) for one in progress)), seconds=1.0
        )
    )
    assert learner.steps[0][0].host == (HostBatch(1, 5, 0), *joined)


def test_the_cpus_work_counts_by_its_median() -> None:
    learner = Learner()
    forecasts = Forecasts([learner])
    works = (HostWork(2, 18, 1.0), HostWork(2, 18, 90.0), HostWork(2, 18, 2.0), HostWork(1, 5, 3.0))
    forecasts.on_result(StepResult(None, host=HostResult(work=works)))  # of nobody's plan
    forecasts.on_plan(StepPlan(0, rows=DEVICE_ROWS), None, Decision(5, 1))
    forecasts.on_result(StepResult(0, host=HostResult(work=works), seconds=1.0))
    assert learner.works == [(2, 18, 2.0), (1, 5, 3.0)]


def test_nothing_is_learned_of_a_step_that_lost_the_cpu_nor_of_plans_that_are_lost() -> None:
    learner = Learner()
    forecasts = Forecasts([learner])
    for step in (0, 1):
        forecasts.on_plan(StepPlan(step, rows=DEVICE_ROWS), None, Decision(5, 1))
    forecasts.on_result(StepResult(0, seconds=9.0, host=HostResult(lost="it hangs")))
    forecasts.on_reset()
    forecasts.on_result(StepResult(1, seconds=9.0))
    assert learner.steps == []


def test_there_are_none_where_nobody_learns_and_for_plans_without_rows() -> None:
    shown = list[Event]()
    for predictors in ([], [LinearPredictor()]):
        forecasts = Forecasts(predictors, shown.append)
        forecasts.on_plan(StepPlan(0, rows=DEVICE_ROWS), None, Decision(5, 1))
        forecasts.on_result(
            StepResult(0, host=HostResult(work=(HostWork(1, 5, 3.0),)), seconds=9.0)
        )
    forecasts = Forecasts([Learner()], shown.append)
    forecasts.on_plan(StepPlan(0, host=HostPlan(strategy="overlap")), None, Decision(5, 1))
    assert not shown


def test_the_scheduler_forgets_what_will_not_be_answered() -> None:
    for end in ("die", "fail"):
        learner, shown = Learner(), list[Event]()
        bench = Bench(predictors=[learner, learner])
        learn_from_results(bench.scheduler)
        (forecasts,) = bench.scheduler.observers
        assert isinstance(forecasts, Forecasts)
        recorder_of(bench.engine).add(shown.append)
        bench.add("a", length=3, max_tokens=4)
        plan = bench.scheduler.schedule(0.0)
        assert plan is not None
        assert any(isinstance(one, Forecast) and one.step == plan.step for one in shown)
        if end == "die":
            bench.scheduler.apply(StepResult(None, lost="killed"), 0.0)
        else:
            bench.scheduler.fail_steps("no memory", 0.0)
        forecasts.on_result(StepResult(plan.step, seconds=9.0))
        assert learner.steps == []


# --------------------------------------------------------------------------------------------------
# alternatives


@pytest.mark.parametrize(
    "policy", [AsymmetricPipelining(512), ApexAlgorithm1(512, 0.0), HybridByPrediction(512)]
)
def test_decisions_tell_what_was_weighed(policy: Policy) -> None:
    for load in (hosting(DECODES, 100), hosting(DECODES, 5)):
        decision = policy.decide(load)
        by_strategy = {one.strategy: one for one in decision.host.alternatives}
        alone = by_strategy["device"]  # 10 decodes in four layers of 2 s
        assert (alone.seconds, alone.per_second) == pytest.approx((8.0, 10 / 8))
        if not isinstance(policy, ApexAlgorithm1):  # which overlaps what does not pay otherwise
            assert (
                max(decision.host.alternatives, key=lambda one: one.per_second).strategy
                == decision.host.strategy
            )
    assert policy.decide(DECODES).host.alternatives == ()  # nobody is on the host


def test_neos_alternative_is_worked_out_by_hand() -> None:
    weighed = AsymmetricPipelining(512).decide(hosting(DECODES, 100)).host.alternatives
    assert weighed[1] == Alternative("asymmetric", 12.0, 16 / 12)


def test_decisions_are_equal_whatever_was_weighed() -> None:
    assert (
        replace(PLAN, host=replace(PLAN.host, alternatives=(Alternative("overlap", 1.0, 2.0),)))
        == PLAN
    )


# --------------------------------------------------------------------------------------------------
# replay


def requests() -> Iterator[Request]:
    for number in range(40):
        yield Request(
            f"r{number}",
            (1,) * (4 + 5 * number % 9),
            SamplingParams(),
            3 + 7 * number % 12,
            end_tokens=(END_TOKEN,),
            arrival_time=number * 2.0,
        )


@pytest.mark.parametrize("policy", ["neo", "overlap", "apex", "hybrid"])
def test_a_replay_learns_the_same_and_so_decides_the_same(policy: str) -> None:
    times = TierTimes(layer=0.1, token=0.01, key=0.01, host_key=0.008, swap_token=0.01, sample=0.01)
    wrong = LinearPredictor(
        num_layers=3, linear=0.3, row=0.01, key=0.003, prompt_token=0.02, host_key=0.02
    )
    made: list[Scheduler] = []

    def scheduler() -> Scheduler:
        predictor = CorrectedPredictor(wrong)
        made.append(
            Scheduler(
                make_policy(policy, 32, {"minimum_ratio": 0.0} if policy == "apex" else {}),
                num_blocks=24,
                block_size=2,
                max_model_len=48,
                prefix_caching=False,
                extensions=make_extensions(host_blocks=200),
                predictors=[predictor],
            )
        )
        return made[-1]

    executor = SimulatedExecutor(times, block_size=2)
    record = record_run(Engine(scheduler(), executor, vocab_size=VOCAB_SIZE), requests())
    assert executor.host_tokens > 20
    assert sum(len(result.host.work) for result in record.results) > 20
    assert replay(record, scheduler, vocab_size=VOCAB_SIZE) == record.plans
    corrections = [one.predictors[0].corrections for one in made]  # type: ignore[attr-defined]
    assert corrections[0] == corrections[1]
    assert corrections[0]["linear"] < 0.8
