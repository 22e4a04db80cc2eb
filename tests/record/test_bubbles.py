"""Shares of the stages' time, on a simulated pipeline whose times can be told without a
pencil."""

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.policies.simulated import compare_with_simulator
from nanoserve.lab.benchmarks.policies.variants import make_requests, run_requests
from nanoserve.lab.simulator.pipeline import Runtime
from nanoserve.record.run_record import RunRecord, engine_seconds, stage_shares, working_seconds
from nanoserve.request import RequestShape
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.observed_executor import ObservedExecutor, UntoldExecutor, dummy_answers
from tests.lab.simulator.linear_times import LinearTimes

VOCAB_SIZE = 50


def _scheduler(stages: int = 2) -> Scheduler:
    return Scheduler(
        make_policy("throttling", 16),
        num_blocks=100,
        block_size=4,
        max_model_len=60,
        pipeline_depth=stages,
    )


def _run(times: LinearTimes, arrivals: list[float], runtime: Runtime | None = None) -> RunRecord:
    executor = ObservedExecutor(times, runtime=runtime or Runtime())
    requests = make_requests([RequestShape(10, 6)] * len(arrivals), arrivals, VOCAB_SIZE, seed=0)
    stages = times.num_stages
    return run_requests(
        executor, lambda: _scheduler(stages), requests, vocab_size=VOCAB_SIZE, workers=stages
    )


def test_two_even_stages_with_two_micro_batches_are_always_busy() -> None:
    run = _run(LinearTimes(num_stages=2, step=1.0), [0.0] * 8)
    first, second = stage_shares(run)
    steps = len(run.plans)
    # each stage idles for one step, at an end
    assert working_seconds(run) == pytest.approx(steps + 1)
    assert first.bubbles == pytest.approx(1 / (steps + 1))
    assert second.bubbles == pytest.approx(1 / (steps + 1))
    assert (first.metadata, first.sending) == (0, 0)
    assert engine_seconds(run) == [0.0] * steps  # virtual time


def test_time_without_requests_is_no_bubble() -> None:
    together = _run(LinearTimes(num_stages=2), [0.0])
    apart = _run(LinearTimes(num_stages=2), [0.0, 512.0])
    assert working_seconds(apart) == pytest.approx(2 * working_seconds(together))
    assert stage_shares(apart)[0].bubbles == pytest.approx(stage_shares(together)[0].bubbles)


def test_preparing_counts_only_while_the_stage_could_compute() -> None:
    decoupled = _run(LinearTimes(num_stages=2, step=1.0, host=0.125), [0.0] * 8)
    first, second = stage_shares(decoupled)
    assert first.metadata > 0  # its plans come when it is free
    assert second.metadata == 0  # prepared while the first stage computes
    for share in (first, second):
        assert share.computing + share.sending + share.metadata + share.waiting == pytest.approx(1)


def test_the_simulator_makes_the_same_of_a_simulated_run() -> None:
    times = LinearTimes(
        num_stages=2, step=0.5, decode=0.03125, prompt_token=0.0625, send=0.125, host=0.125
    )
    run = _run(times, [0.0, 0.0, 0.5, 3.0, 3.25, 3.25, 9.0])
    compared = compare_with_simulator(run, _scheduler, vocab_size=VOCAB_SIZE)
    assert compared is not None
    assert compared["makespan"] == pytest.approx(1)
    assert compared["ttft"] == pytest.approx(1)
    assert compared["tpot"] == pytest.approx(1)
    assert compared["replayed"] == compared["plans"] == len(run.plans)
    assert compared["others"] == 0


def test_one_process_tells_no_times() -> None:
    executor = UntoldExecutor(LinearTimes(), answer=dummy_answers)
    requests = make_requests([RequestShape(10, 1)], [0.0], VOCAB_SIZE, seed=0)
    run = run_requests(executor, lambda: _scheduler(1), requests, vocab_size=VOCAB_SIZE)
    assert (stage_shares(run), run.stage_times) == ([], [])
    assert run.timings[0].tpot is None


def test_a_request_that_fails_ends_the_run() -> None:
    def failing(plan: StepPlan) -> tuple[Answer, ...]:
        return tuple(
            Answer(row.sequence, error="its logits are no numbers")
            for row in plan.rows
            if row.sample
        )

    executor = ObservedExecutor(LinearTimes(num_stages=2), answer=failing)
    requests = make_requests([RequestShape(10, 6)], [0.0], VOCAB_SIZE, seed=0)
    with pytest.raises(RuntimeFailure, match="its logits are no numbers"):
        run_requests(executor, _scheduler, requests, vocab_size=VOCAB_SIZE, workers=2)


def test_workers_that_report_nothing_of_a_plan_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(ObservedExecutor):
        def take_times(self) -> list:  # type: ignore[type-arg]
            return [times for times in super().take_times() if (times.rank, times.step) != (1, 2)]

    monkeypatch.setattr("nanoserve.lab.benchmarks.policies.variants._PATIENCE", 0.1)
    requests = make_requests([RequestShape(10, 6)], [0.0], VOCAB_SIZE, seed=0)
    with pytest.raises(RuntimeFailure, match="did not report"):
        run_requests(
            Silent(LinearTimes(num_stages=2)),
            _scheduler,
            requests,
            vocab_size=VOCAB_SIZE,
            workers=2,
        )


def test_a_run_in_which_workers_die_is_refused() -> None:
    class Dying(ObservedExecutor):
        died = False

        def collect(self, until: float | None) -> list[StepResult]:
            results = super().collect(until)
            if results and not self.died:
                self.died = True
                self._pending, self._in_flight = [], 0
                return [StepResult(None, lost="worker 1 was killed")]
            return results

    requests = make_requests([RequestShape(10, 6)], [0.0], VOCAB_SIZE, seed=0)
    with pytest.raises(RuntimeFailure, match="a run in which workers die: worker 1 was killed"):
        run_requests(
            Dying(LinearTimes(num_stages=2)), _scheduler, requests, vocab_size=VOCAB_SIZE, workers=2
        )
