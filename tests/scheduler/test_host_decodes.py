"""Sequences that decode in host memory: cohorts under way, growth, aborts and failures."""

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.request import FinishReason
from nanoserve.scheduler.load import Cohort, Decision
from tests.scheduler.tiered import Bench

OVERLAP = Decision(64, 64, strategy="overlap", host_decodes=(1, 0))


def _on_host(count: int, max_tokens: int = 4, **settings: int) -> Bench:
    """So many sequences of four tokens, all of them in host memory."""
    bench = Bench(**settings)
    for name in "abcd"[:count]:
        bench.add(name, 4, max_tokens)
    bench.step(Decision(64, 0, park=True))
    bench.step(Decision(64, 0))
    assert len(bench.swapped()) == count
    return bench


def test_the_policy_sees_the_cohorts_under_way_the_most_advanced_first() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)
    bench.step()
    bench.step()
    assert bench.load.cohorts == (Cohort(layers=1, sequences=1, context_tokens=5), Cohort(0, 1, 5))
    assert (bench.load.host_decodes, bench.load.ready_host) == (2, 0)
    bench.finish()


def test_a_plan_on_the_device_lets_host_sequences_advance_only_where_it_overlaps() -> None:
    bench = _on_host(1)
    bench.add("z", 4, 8)
    bench.step(OVERLAP)
    bench.step(Decision(64, 64))
    assert [plan.strategy for plan in bench.plans[-2:]] == ["overlap", "device"]
    bench.step(OVERLAP)
    assert bench.load.cohorts == (Cohort(0, 1, 5),)
    bench.finish()


def test_host_sequences_under_way_go_on_when_a_policy_knows_nothing_of_them() -> None:
    bench = _on_host(1)
    bench.step(OVERLAP)
    forced = bench.scheduler.forced_steps
    while not bench.step(Decision(64, 64)):
        pass
    assert [(plan.strategy, plan.rows) for plan in bench.plans[-2:]] == [("overlap", ())] * 2
    assert bench.scheduler.forced_steps == forced
    bench.finish()


def test_a_drain_waits_for_the_host_sequences_under_way() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)
    bench.finish(Decision(64, 64, swap_in=2, layout=1))
    kinds = [(plan.strategy, plan.transition) for plan in bench.plans if not plan.rows and not plan.swaps]
    assert kinds == [("overlap", None), ("overlap", None), ("device", 1)]


def test_a_host_sequence_given_up_while_its_token_is_under_way_keeps_its_blocks_until_the_answer() -> None:
    bench = _on_host(1)
    bench.step(OVERLAP)
    bench.give_up("a")
    assert bench.scheduler.host_pool.free_blocks == 5
    bench.finish()


def test_the_newest_on_the_host_gives_way_to_an_older_one_that_grows() -> None:
    bench = _on_host(2, max_tokens=6, host_blocks=6)
    bench.finish(Decision(64, 64, strategy="asymmetric", host_decodes=(1, 0)))
    assert bench.scheduler.preemptions == 1


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_one_under_way_gives_way_with_its_answer(strategy: str) -> None:
    bench = _on_host(2, max_tokens=6, host_blocks=6)
    bench.finish(Decision(64, 64, strategy=strategy, host_decodes=(2, 0)))
    assert bench.scheduler.preemptions == 1


def test_a_failure_ends_the_host_sequences_under_way_and_not_those_that_wait_there() -> None:
    bench = _on_host(2)
    bench.step(OVERLAP)

    def fails(until: float | None) -> list:
        raise RuntimeFailure("the host attention stopped")

    collect, bench.executor.collect = bench.executor.collect, fails  # type: ignore[method-assign]
    (update,) = bench.step(Decision(0, 0))
    assert (update.request_id, update.sequence.finish_reason) == ("a", FinishReason.ERROR)
    assert bench.load.cohorts == (Cohort(0, 1, 5),)
    assert bench.scheduler.host_pool.free_blocks == 5
    bench.executor.collect = collect  # type: ignore[method-assign]
    del bench.requests["a"]
    bench.executor.forget_what_is_in_flight()
    bench.finish()
