"""Moving between device and host memory: swaps, parking, and making way without recomputation."""

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.plan import StepPlan
from tests.fakes.integrity import host_pool
from tests.scheduler.tiered import Bench

DECODE = Decision(0, 64)
IDLE = Decision(0, 0)


def _two_decodes(**settings: int) -> Bench:
    bench = Bench(**settings)
    bench.add("a", 4, 6)
    bench.add("b", 4, 6)
    bench.step()
    return bench


def test_the_newest_is_swapped_out_while_the_oldest_decodes() -> None:
    bench = _two_decodes()
    bench.step(Decision(0, 64, host=HostDecision(swap_out=1)))
    (plan,) = bench.plans[1:]
    assert [swap.sequence for swap in plan.host.swaps] == [1]
    assert [row.sequence for row in plan.rows] == [0]
    assert plan.end == (1,)
    bench.step(DECODE)
    assert (bench.load.running_decodes, bench.load.host.decodes, bench.load.host.ready) == (1, 1, 1)
    assert (bench.load.host.context_tokens, bench.load.host.free_blocks) == (4, 6)
    bench.finish(Decision(0, 64, host=HostDecision(swap_in=1)))


def test_no_more_are_swapped_out_than_the_host_has_room_for() -> None:
    bench = _two_decodes(host_blocks=3)
    bench.step(Decision(0, 64, host=HostDecision(swap_out=2)))
    assert bench.swapped() == ["1 out"]
    bench.finish(Decision(0, 64, host=HostDecision(swap_in=1)))


def test_a_swapped_sequence_keeps_its_blocks_on_both_tiers_until_the_answer() -> None:
    bench = _two_decodes(swap_delay=2)
    bench.step(Decision(0, 64, host=HostDecision(swap_out=1)))
    for _ in range(2):
        assert (bench.scheduler.pool.free_blocks, host_pool(bench.scheduler).free_blocks) == (3, 6)
        bench.step(IDLE)
        assert bench.load.host.moving == 1
    assert (bench.scheduler.pool.free_blocks, host_pool(bench.scheduler).free_blocks) == (5, 6)
    bench.finish(DECODE)


def test_a_sequence_comes_back_only_to_a_device_with_a_free_block_for_each_decode() -> None:
    bench = _two_decodes(num_blocks=5)
    # the other decodes, and takes its third block
    bench.step(Decision(0, 64, host=HostDecision(swap_out=1)))
    # two blocks are free, but one is to stay so
    bench.step(Decision(0, 0, host=HostDecision(swap_in=1)))
    assert bench.swapped() == ["1 out"]
    bench.give_up("a")
    bench.step()
    assert bench.swapped() == ["1 out", "1 in"]
    bench.finish(DECODE)


def test_a_policy_that_sends_everything_away_still_lets_it_come_to_an_end() -> None:
    bench = _two_decodes()
    bench.finish(Decision(0, 64, host=HostDecision(swap_out=64)))
    assert bench.scheduler.forced_steps > 0
    bench = _two_decodes()
    bench.finish(Decision(0, 0, host=HostDecision(swap_out=64, swap_in=64)))


@pytest.mark.parametrize(
    "decision",
    [Decision(0, 0, host=HostDecision(swap_out=1)), Decision(0, 0, host=HostDecision(swap_in=1))],
)
def test_a_sequence_given_up_while_it_moves_returns_its_blocks_when_it_has_moved(
    decision: Decision,
) -> None:
    bench = _two_decodes(swap_delay=1)
    if decision.host.swap_in:
        for _ in range(3):
            bench.step(Decision(0, 0, host=HostDecision(swap_out=1)))
    bench.step(decision)
    (moving,) = [swap.sequence for swap in bench.plans[-1].host.swaps]
    held = bench.scheduler.pool.free_blocks + host_pool(bench.scheduler).free_blocks
    bench.give_up("ab"[moving])
    assert bench.scheduler.pool.free_blocks + host_pool(bench.scheduler).free_blocks == held
    bench.finish(DECODE)


def test_a_step_and_a_swap_that_fail_end_their_sequences_with_the_error_and_no_others() -> None:
    bench = _two_decodes(swap_delay=1)

    def fails(until: float | None) -> list:
        raise RuntimeFailure("the copy engine stopped")

    bench.executor.collect = fails  # type: ignore[method-assign]
    bench.add("c", 2, 1)
    first, second = bench.step(Decision(0, 1, host=HostDecision(swap_out=1)))
    assert (first.request_id, second.request_id) == ("a", "b")
    assert {first.sequence.finish_reason, second.sequence.finish_reason} == {FinishReason.ERROR}
    assert {first.sequence.error, second.sequence.error} == {"the copy engine stopped"}
    assert (bench.scheduler.pool.free_blocks, host_pool(bench.scheduler).free_blocks) == (8, 8)
    assert [sequence.request.request_id for sequence in bench.scheduler.waiting] == ["c"]


# ---- parking ----


def test_a_parked_prompt_moves_with_its_last_row_and_its_reservation_was_made_before() -> None:
    bench = Bench()
    bench.add("a", 5, 3)
    bench.step(Decision(3, 0, host=HostDecision(park=True)))
    assert host_pool(bench.scheduler).free_blocks == 5  # five tokens, and the first of the answer
    assert bench.swapped() == []
    bench.step()
    (swap,) = bench.plans[-1].host.swaps
    (row,) = bench.plans[-1].rows
    assert (swap.sequence, swap.direction, swap.after_row) == (0, "out", True)
    assert (row.start, row.sample, bench.plans[-1].end) == (3, True, ())
    bench.step(Decision(0, 64, host=HostDecision(swap_in=1)))
    assert bench.plans[-1].end == (0,), "what the executor knew of it on the device"
    bench.finish()


def test_a_prompt_that_the_host_cannot_hold_is_not_begun() -> None:
    bench = Bench(host_blocks=3)
    bench.add("a", 4, 3)
    bench.add("b", 2, 3)
    bench.step(Decision(64, 0, host=HostDecision(park=True)))
    assert [[row.sequence for row in plan.rows] for plan in bench.plans] == [[0]]
    bench.step(Decision(64, 0))  # this step does not park
    assert [row.sequence for row in bench.plans[-1].rows] == [1]
    bench.finish(Decision(0, 64, host=HostDecision(swap_in=1)))


def test_a_reservation_is_given_back_by_an_abort_and_by_a_step_that_does_not_park() -> None:
    for give_up in (True, False):
        bench = Bench()
        bench.add("a", 5, 3)
        bench.step(Decision(3, 0, host=HostDecision(park=True)))
        if give_up:
            bench.give_up("a")
        else:
            bench.step(Decision(64, 0))
        assert host_pool(bench.scheduler).free_blocks == 8
        bench.finish(DECODE)
        assert bench.swapped() == []


def test_decodes_leave_the_room_of_the_next_prompt_to_be_parked_but_the_oldest_goes_on() -> None:
    bench = _two_decodes(num_blocks=6)
    bench.add("c", 4, 2)
    # two blocks are free, the prompt takes both; each decode wants one
    bench.step(Decision(1, 64, host=HostDecision(park=True)))
    assert [row.sequence for row in bench.plans[-1].rows] == [0, 2]
    bench.finish(Decision(64, 64, host=HostDecision(park=True, swap_in=1)))


# ---- making way ----


def _out_of_blocks(host_blocks: int, swap_delay: int = 0) -> Bench:
    """All six blocks are full; the next token of each of the three wants another."""
    bench = Bench(num_blocks=6, host_blocks=host_blocks, swap_delay=swap_delay)
    for name in "abc":
        bench.add(name, 4, 6)
    bench.step()
    return bench


def test_a_victim_moves_to_the_host_and_is_not_computed_again() -> None:
    bench = _out_of_blocks(host_blocks=8, swap_delay=3)
    for _ in range(4):  # nobody else has to go while its blocks are on their way back
        bench.step(Decision(64, 64, host=HostDecision(preempt=True)))
    assert bench.swapped() == ["2 out"]
    assert [len(plan.rows) for plan in bench.plans] == [3, 0]
    bench.step()
    assert [row.sequence for row in bench.plans[-1].rows] == [0, 1]
    bench.finish(Decision(64, 64, host=HostDecision(preempt=True, swap_in=1)))
    assert bench.scheduler.table.preemptions == 0


def test_a_victim_for_which_the_host_has_no_room_is_computed_again() -> None:
    bench = _out_of_blocks(host_blocks=1)
    bench.finish(Decision(64, 64, host=HostDecision(preempt=True)))
    assert bench.swapped() == []
    assert bench.scheduler.table.preemptions > 0


def test_room_is_not_kept_for_a_prompt_that_waits_for_a_decode_to_get_its_blocks() -> None:
    bench = _out_of_blocks(host_blocks=8)
    bench.add("d", 4, 2)
    # the third moves away, for the first two want a block each
    bench.step(Decision(0, 64, host=HostDecision(preempt=True)))
    assert (bench.swapped(), bench.plans[-1].rows) == (["2 out"], ())
    # nor may the prompt begin before the second has its block
    bench.step(Decision(64, 64, host=HostDecision(park=True)))
    assert [row.sequence for row in bench.plans[-1].rows] == [0, 1]
    bench.finish(Decision(64, 64, host=HostDecision(park=True, preempt=True, swap_in=1)))


def test_a_sequence_that_came_back_shares_its_blocks_again() -> None:
    bench = Bench(num_blocks=5, other=5)
    bench.add("a", 4, 3)
    bench.step()
    bench.step(Decision(0, 0, host=HostDecision(swap_out=1)))
    bench.add("b", 9, 1)  # takes all blocks, and with them what was cached of the first
    bench.step(Decision(64, 64))
    bench.step(Decision(0, 64, host=HostDecision(swap_in=1)))
    bench.step()  # it comes back, and computes a token
    again = Request("again", (*bench.requests["a"].prompt, 9), SamplingParams(max_tokens=1), seed=0)
    bench.outputs["again"] = []
    bench.engine.add(again)
    (update,) = [one for one in bench.step(Decision(64, 0)) if one.request_id == "again"]
    assert update.sequence.cached_tokens == 4
    bench.finish(DECODE)


def test_plans_that_only_swap_take_no_place_in_flight() -> None:
    bench = _two_decodes()
    bench.policy.decision = Decision(0, 0, host=HostDecision(swap_out=1))
    plan = bench.scheduler.schedule(0.0)
    assert isinstance(plan, StepPlan)
    assert (len(plan.host.swaps), len(plan.rows), bench.scheduler.steps_in_flight) == (1, 0, 0)
    assert bench.scheduler.awaits_results
    bench.policy.decision = DECODE
    beside = bench.scheduler.schedule(0.0)
    assert beside is not None
    assert [row.sequence for row in beside.rows] == [0]
    for one in (plan, beside):
        bench.executor.submit(one)
    bench.finish(DECODE)
