"""Attention on the CPU dies at any moment: nobody who listens to a sequence can tell, and no block
is lost."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.cpu_attention.host_decoding import MOST_LOSSES
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import HostDecision, HostResult
from nanoserve.scheduler.plan import StepResult
from tests.fakes.integrity import check_integrity, host_pool
from tests.scheduler.lives import lives
from tests.scheduler.tier_lives import DECIDED, TIERS, AlsoUsingTheHost, AtRandom, check
from tests.scheduler.tiered import Bench

CALLS = st.one_of(st.integers(1, 12), st.integers(1, 60))
LOSSES = st.frozensets(CALLS, min_size=1, max_size=6)
OVERLAP = Decision(64, 64, host=HostDecision(strategy="overlap", decodes=(1, 0)))

# ----------------------------------------------------------------------------------------------
# random lives


@settings(max_examples=50, deadline=None)
@given(life=lives(), memory=TIERS, decided=DECIDED, losses=LOSSES)
def test_whatever_is_decided_every_request_gets_its_tokens(
    life: dict, memory: dict, decided: list[Decision], losses: frozenset[int]
) -> None:
    check(AtRandom(decided), life, memory, host_losses=losses)


@settings(max_examples=30, deadline=None)
@given(
    life=lives(),
    memory=TIERS,
    decided=DECIDED,
    losses=LOSSES,
    deaths=st.frozensets(CALLS, min_size=1, max_size=3),
)
def test_the_host_and_whole_workers_may_be_lost_in_turn(
    life: dict,
    memory: dict,
    decided: list[Decision],
    losses: frozenset[int],
    deaths: frozenset[int],
) -> None:
    check(AtRandom(decided), life, memory, deaths, losses)


@pytest.mark.parametrize(
    "name", [name for name in POLICIES if POLICIES[name].attends_on_host] + ["seesaw", "sarathi"]
)
@settings(max_examples=10, deadline=None)
@given(life=lives(), memory=TIERS, losses=LOSSES)
def test_every_policy_with_host_decodes_beside_it(
    name: str, life: dict, memory: dict, losses: frozenset[int]
) -> None:
    check(
        AlsoUsingTheHost(make_policy(name, life["token_budget"])), life, memory, host_losses=losses
    )


# -------------------------------------------------------------------------------------------------
# one by one


def _on_host(names: str, **settings: Any) -> Bench:
    """So many sequences of four tokens, all of them in host memory."""
    bench = Bench(**settings)
    for name in names:
        bench.add(name, 4, 4)
    bench.step(Decision(64, 0, host=HostDecision(park=True)))
    assert len(bench.scheduler.extensions.host.on_host) == len(names)
    return bench


def test_a_sequence_under_way_and_one_that_waits_are_computed_again_and_the_device_goes_on() -> (
    None
):
    bench = _on_host("ab", num_blocks=16)
    bench.add("z", 4, 8)
    bench.step(OVERLAP)
    bench.executor.host_dies()
    (update,) = bench.step()
    assert update.request_id == "z", "its row was in the plan, too"
    assert host_pool(bench.scheduler).free_blocks == host_pool(bench.scheduler).num_blocks
    assert [sequence.sequence_id for sequence in bench.scheduler.waiting] == [0, 1]
    assert [sequence.request.request_id for sequence in bench.scheduler.running] == ["z"]
    bench.step(Decision(64, 64))
    assert (bench.load.host.cohorts, bench.load.host.decodes, bench.load.host.total_blocks) == (
        (),
        0,
        8,
    )
    assert bench.plans[-1].end == (0, 1)
    begins = {begin.sequence: begin.tokens for begin in bench.plans[-1].begin}
    assert all(begins[index][:4] == bench.requests[name].prompt for index, name in enumerate("ab"))
    assert [len(begins[index]) for index in range(2)] == [5, 5], "with the token that was answered"
    bench.finish()
    assert (bench.scheduler.extensions.cpu_attention.losses, bench.scheduler.table.preemptions) == (
        1,
        2,
    )


def test_an_asymmetric_step_ends_without_the_tokens_of_its_host_sequences() -> None:
    bench = _on_host("ab")
    bench.add("z", 4, 8)
    bench.step(Decision(64, 0))
    bench.executor.host_dies()
    (update,) = bench.step(
        Decision(0, 64, host=HostDecision(strategy="asymmetric", decodes=(1, 1)))
    )
    assert [row.sequence for row in bench.plans[-1].rows] == [2, 0, 1]
    assert update.request_id == "z"
    assert len(bench.scheduler.waiting) == 2
    bench.finish(Decision(64, 64))


def test_a_request_given_up_while_its_token_is_under_way_is_gone_with_the_loss() -> None:
    bench = _on_host("ab")
    bench.step(OVERLAP)
    bench.give_up("a")
    bench.executor.host_dies()
    bench.step()
    assert host_pool(bench.scheduler).free_blocks == host_pool(bench.scheduler).num_blocks
    bench.add("a", 4, 2)  # its name is free again
    bench.finish()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_what_is_on_its_way_arrives_whole(direction: str) -> None:
    bench = _on_host("a") if direction == "in" else Bench()
    if direction == "out":
        bench.add("a", 4, 4)
        bench.step()
    bench.executor._swap_delay = 2
    bench.step(Decision(0, 0, host=HostDecision(swap_out=1, swap_in=1)))
    bench.executor.host_dies()
    bench.step()
    assert bench.load.host.moving == 1
    bench.finish(Decision(0, 64, host=HostDecision(strategy="overlap", decodes=(1, 0))))
    assert (bench.scheduler.extensions.cpu_attention.losses, bench.scheduler.table.preemptions) == (
        1,
        0,
    )


def test_after_three_losses_there_is_no_host_tier() -> None:
    bench = _on_host("a")
    bench.add("c", 5, 3)
    # a place on the host is reserved for it
    bench.step(Decision(3, 0, host=HostDecision(park=True)))
    bench.add("b", 4, 4)
    for _ in range(MOST_LOSSES):
        bench.scheduler.apply(StepResult(None, host=HostResult(lost="killed")), 0.0)
        check_integrity(bench.scheduler)
    bench.executor.host_dies()  # for the memory's sake; nobody is there to be lost
    swaps = len(bench.swapped())
    bench.step(Decision(64, 64, host=HostDecision(park=True, preempt=True, swap_out=9)))
    assert (bench.load.host.total_blocks, bench.load.host.free_blocks, bench.load.host.decodes) == (
        0,
        0,
        0,
    )
    assert host_pool(bench.scheduler).free_blocks == host_pool(bench.scheduler).num_blocks
    bench.finish()
    assert len(bench.swapped()) == swaps


def test_what_arrives_on_a_host_that_was_given_up_is_computed_again() -> None:
    bench = Bench(swap_delay=1)
    bench.add("a", 4, 4)
    bench.step()
    bench.step(Decision(0, 0, host=HostDecision(swap_out=1)))
    for _ in range(MOST_LOSSES):
        bench.scheduler.apply(StepResult(None, host=HostResult(lost="killed")), 0.0)
    while bench.scheduler.awaits_results:
        bench.step()
    assert len(bench.scheduler.waiting) == 1
    bench.finish(Decision(64, 64))
    assert bench.scheduler.table.preemptions == 1
