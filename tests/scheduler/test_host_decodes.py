"""Sequences that decode in host memory: cohorts under way, growth, aborts and failures."""

from itertools import cycle

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.request import FinishReason
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import Cohort, HostDecision
from tests.fakes.integrity import host_pool
from tests.scheduler.tiered import Bench

OVERLAP = Decision(64, 64, host=HostDecision(strategy="overlap", decodes=(1, 0)))


def _on_host(count: int, max_tokens: int = 4, **settings: int) -> Bench:
    """So many sequences of four tokens, all of them in host memory."""
    bench = Bench(**settings)
    for name in "abcd"[:count]:
        bench.add(name, 4, max_tokens)
    bench.step(Decision(64, 0, host=HostDecision(park=True)))
    assert len(bench.swapped()) == count
    return bench


def test_the_policy_sees_the_cohorts_under_way_the_most_advanced_first() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)
    bench.step()
    bench.step()
    assert bench.load.host.cohorts == (
        Cohort(layers=1, sequences=1, context_tokens=5),
        Cohort(0, 1, 5),
    )
    assert (bench.load.host.decodes, bench.load.host.ready) == (2, 0)
    bench.finish()


def test_an_asymmetric_step_finishes_the_most_advanced_token() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)
    bench.step(OVERLAP)
    bench.step(Decision(0, 0, host=HostDecision(strategy="asymmetric", decodes=(1, 0))))
    assert bench.load.host.cohorts[0].layers > bench.load.host.cohorts[1].layers
    assert [row.sequence for row in bench.plans[-1].rows] == [0]
    bench.finish()


def test_what_is_under_way_goes_on_beside_steps_that_were_decided_without_the_host() -> None:
    bench = _on_host(2)
    bench.add("z", 4, 8)
    bench.step(OVERLAP)
    bench.step(Decision(64, 64))
    assert [plan.host.strategy for plan in bench.plans[-2:]] == ["overlap", "overlap"]
    bench.step()
    assert bench.load.host.cohorts == (Cohort(1, 1, 5),)
    assert (bench.load.host.decodes, bench.load.host.ready) == (2, 1), "none begins"
    bench.step()
    assert bench.plans[-1].host.strategy == "device"
    bench.finish()


def test_host_sequences_under_way_go_on_when_a_policy_knows_nothing_of_them() -> None:
    bench = _on_host(1)
    bench.step(OVERLAP)
    forced = bench.scheduler.forced_steps
    while not bench.step(Decision(64, 64)):
        pass
    assert [(plan.host.strategy, plan.rows) for plan in bench.plans[-2:]] == [("overlap", ())] * 2
    assert bench.scheduler.forced_steps == forced
    bench.finish()


def test_a_drain_waits_for_the_host_sequences_under_way() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)
    bench.finish(Decision(64, 64, host=HostDecision(swap_in=2), layout=1))
    kinds = [
        (plan.host.strategy, plan.layouts.transition)
        for plan in bench.plans
        if not plan.rows and not plan.host.swaps
    ]
    assert kinds == [("overlap", None), ("overlap", None), ("device", 1)]


def test_a_host_sequence_given_up_while_its_token_is_under_way_keeps_its_blocks_until_the_answer() -> (
    None
):
    bench = _on_host(1)
    bench.step(OVERLAP)
    bench.give_up("a")
    assert host_pool(bench.scheduler).free_blocks == 5
    bench.finish()


def test_the_newest_on_the_host_gives_way_to_an_older_one_that_grows() -> None:
    bench = _on_host(2, max_tokens=6, host_blocks=6)
    bench.finish(Decision(64, 64, host=HostDecision(strategy="asymmetric", decodes=(1, 0))))
    assert bench.scheduler.table.preemptions == 1


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_one_under_way_gives_way_with_its_answer(strategy: str) -> None:
    bench = _on_host(2, max_tokens=6, host_blocks=6)
    bench.finish(Decision(64, 64, host=HostDecision(strategy=strategy, decodes=(2, 0))))
    assert bench.scheduler.table.preemptions == 1


def test_a_failure_ends_the_host_sequences_under_way_and_not_those_that_wait_there() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)

    def fails(until: float | None) -> list:
        raise RuntimeFailure("the host attention stopped")

    collect, bench.executor.collect = bench.executor.collect, fails  # type: ignore[method-assign]
    (update,) = bench.step(Decision(0, 0))
    assert (update.request_id, update.sequence.finish_reason) == ("a", FinishReason.ERROR)
    assert bench.load.host.cohorts == (Cohort(0, 1, 5),)
    assert host_pool(bench.scheduler).free_blocks == 5
    bench.executor.collect = collect  # type: ignore[method-assign]
    del bench.requests["a"]
    bench.executor.forget_what_is_in_flight()
    bench.finish()


# ---- several plans in flight ----


def _pipeline(decodes: str) -> Bench:
    """Three plans in flight; one sequence on the host, the others decode on the device."""
    bench = _on_host(1, num_blocks=24, depth=3)
    for name in decodes:
        bench.add(name, 4, 8)
    bench.policy.decision = Decision(64, 0)
    while bench.load.running_decodes < len(decodes):
        bench.step()
    return bench


def test_all_plans_of_a_pipeline_take_those_under_way_along() -> None:
    bench = _pipeline("xyz")
    before = len(bench.plans)
    bench.step(Decision(64, 1, host=HostDecision(strategy="overlap", decodes=(1, 0))))
    plans = bench.plans[before:]
    assert [plan.host.strategy for plan in plans] == ["overlap"] * 3
    assert [[row.sequence for row in plan.rows] for plan in plans] == [[1, 0], [2], [3]]
    bench.step()
    assert bench.load.host.cohorts == (Cohort(0, 1, 5),), "as the first of them told"
    bench.step(Decision(64, 1))  # it has its token: with the third
    bench.step()
    assert bench.load.host.cohorts == ()
    bench.finish()


def test_what_a_plan_in_flight_may_be_finishing_is_not_told_to_end_in_another() -> None:
    bench = _pipeline("xyz")
    bench.step(Decision(64, 1, host=HostDecision(strategy="overlap", decodes=(1, 0))))
    before = len(bench.plans)
    bench.step(Decision(64, 1, host=HostDecision(strategy="asymmetric", decodes=(1, 1))))
    bench.step()
    bench.step()
    assert [plan.host.strategy for plan in bench.plans[before:]] == [
        "overlap",
        "overlap",
        "asymmetric",
    ]
    on_host = [row for plan in bench.plans[before:] for row in plan.rows if row.host is not None]
    assert [(row.sequence, row.start) for row in on_host if row.tokens] == [(0, 5)], (
        "its next token"
    )
    bench.finish()


def test_one_that_is_told_to_end_is_told_so_once() -> None:
    bench = _pipeline("x")
    bench.executor._cpu_is_done = cycle([False])
    bench.step(Decision(64, 0, host=HostDecision(strategy="overlap", decodes=(1, 0))))
    before = len(bench.plans)
    bench.step(Decision(64, 1, host=HostDecision(strategy="asymmetric", decodes=(1, 1))))
    (plan,) = bench.plans[before:]
    assert [(row.sequence, row.tokens) for row in plan.rows if row.host is not None] == [(0, ())]
    bench.finish(Decision(64, 64, host=HostDecision(strategy="asymmetric", decodes=(1, 1))))


def test_one_plan_without_rows_is_enough_for_an_idle_pipeline() -> None:
    bench = _on_host(1, depth=3)
    before = len(bench.plans)
    bench.step(OVERLAP)
    assert len(bench.plans) == before + 1
    bench.finish()
