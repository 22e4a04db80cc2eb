"""Runs with two layouts in virtual time: what is measured of them, and that the simulator makes the
same of them."""

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.policies.metrics import layout_metrics
from nanoserve.lab.benchmarks.policies.rounds import Metrics, Run
from nanoserve.lab.benchmarks.policies.variants import PolicyVariant, make_requests
from nanoserve.lab.commands.bench_reshard import resharding_pairs
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, RequestShape
from nanoserve.scheduler.plan import StepPlan, StepResult
from tests.fakes.moving_executor import WEIGHT_BYTES
from tests.lab.benchmarks.policies.simulated_workers import (
    HOST_LINK,
    VOCAB_SIZE,
    simulated_pair,
    variants,
)

RESHARDING = [
    f"{name}-{kind}, P2 -> T2"
    for name, kind in (("prefill", "prioritizing"), ("decode", "prioritizing"))
]
RESHARDING.append("transition-minimizing, P2 -> T2")


def _requests(count: int = 16, output: int = 9) -> list[Request]:
    return make_requests([RequestShape(13, output)] * count, [0.0] * count, VOCAB_SIZE, seed=0)


def _measured(variant: PolicyVariant, output: int = 9) -> tuple[RunRecord, Metrics]:
    record = variant.run(_requests(output=output))
    run = Run(variant, record)
    return record, layout_metrics(run, run)


def _measured_by_name(name: str, output: int = 9) -> tuple[RunRecord, Metrics]:
    return _measured(variants(simulated_pair())[name], output)


def test_who_takes_part() -> None:
    alone = ["sarathi, P2", "throttling, P2", "adaptive, P2", "sarathi, T2"]
    assert list(variants(simulated_pair())) == [*alone, *RESHARDING]


@pytest.mark.parametrize("name", RESHARDING)
def test_phases_cover_the_run_and_moves_are_counted(name: str) -> None:
    run, figures = _measured_by_name(name)
    phases, reshards = figures["phases"], figures["reshards"]
    out, back = figures["swaps_out"], figures["swaps_in"]
    whole = sum(phases[part] for part in ("prefill", "decode", "draining", "resharding"))
    assert whole == pytest.approx(figures["seconds"])
    assert figures["transitions"] == reshards.count >= 3
    to_p2 = reshards.count // 2
    assert phases["resharding"] == pytest.approx(0.5 * (reshards.count - to_p2) + 0.25 * to_p2), (
        "two stages reload less"
    )
    assert phases["resharding"] == pytest.approx(reshards.seconds)
    assert reshards.share_of_link == pytest.approx(
        WEIGHT_BYTES * reshards.count / reshards.seconds / HOST_LINK
    )
    assert out.count == back.count >= 16
    assert 0.5 < figures["pool_peak"] <= 1
    assert figures["output_tokens_per_s"] == pytest.approx(16 * 9 / figures["seconds"])
    assert sum(plan.layouts.transition is not None for plan in run.plans) == figures["transitions"]


def test_few_transitions_are_what_it_minimizes() -> None:
    transitions = [_measured_by_name(name)[1]["transitions"] for name in RESHARDING]
    assert transitions[0] > transitions[1] >= transitions[2] >= 3


@pytest.mark.parametrize(
    "name", ["sarathi, P2", "throttling, P2", "adaptive, P2", "sarathi, T2", *RESHARDING]
)
def test_the_simulator_makes_the_same_of_a_simulated_run(name: str) -> None:
    run, figures = _measured_by_name(name)
    compared = figures["simulated"]
    assert compared["makespan"] == pytest.approx(1, abs=1e-5), "the record's clock ticks"
    assert compared["simulated_transitions"] == figures["transitions"]
    assert compared["plans"] == compared["replayed"] == len(run.plans)
    assert compared["others"] == 0


def test_a_layout_alone_moves_nothing_whatever_the_workers_did_before() -> None:
    engine = simulated_pair()
    named = variants(engine)
    for name in ("sarathi, T2", "transition-minimizing, P2 -> T2", "sarathi, P2", "sarathi, T2"):
        run, figures = _measured(named[name])
        if len(named[name].layouts) == 1:
            assert (figures["transitions"], figures["phases"], figures["pool_peak"], run.moves) == (
                0,
                None,
                None,
                [],
            )
            assert getattr(engine.executor, "layout") == named[name].first  # noqa: B009  # no part of the protocol


def test_answers_of_one_token_never_reach_the_second_layout() -> None:
    _, figures = _measured_by_name("transition-minimizing, P2 -> T2", output=1)
    assert (figures["transitions"], figures["simulated"]) == (0, None)


def test_each_way_of_resharding_is_held_against_all_before_it() -> None:
    held = resharding_pairs(list(variants(simulated_pair()).values()))
    assert len(held) == 4 + 5 + 6
    assert held[0] == (
        "prefill-prioritizing over sarathi, P2",
        "prefill-prioritizing, P2 -> T2",
        "sarathi, P2",
    )


def test_workers_that_die_between_two_runs_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = simulated_pair()
    variant = variants(group)["sarathi, T2"]
    monkeypatch.setattr(group.executor, "submit", lambda plan: None)
    monkeypatch.setattr(
        group.executor, "collect", lambda until: [StepResult(None, lost="worker 1 was killed")]
    )
    with pytest.raises(RuntimeFailure, match="when they changed their layout: worker 1 was killed"):
        variant.run(_requests())


def test_a_run_in_which_workers_die_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = simulated_pair()
    variant = variants(group)["transition-minimizing, P2 -> T2"]
    executor, submitted = group.executor, []
    submit, collect = executor.submit, executor.collect

    def submit_noted(plan: StepPlan) -> None:
        submitted.append(plan)
        submit(plan)

    def collect_dying(until: float | None) -> list[StepResult]:
        results = collect(until)
        if len(submitted) == 2:
            executor._pending, executor._in_flight = [], 0  # type: ignore[attr-defined]
            submitted.append(StepPlan(0))
            return [StepResult(None, lost="worker 0 was killed")]
        return results

    monkeypatch.setattr(executor, "submit", submit_noted)
    monkeypatch.setattr(executor, "collect", collect_dying)
    with pytest.raises(RuntimeFailure, match="a run in which workers die: worker 0 was killed"):
        variant.run(_requests())
