"""Planning: which layouts there are, which fit, how they are estimated, and what simulating them
says."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.counts import Precision
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.simulator.planning import (
    CacheLimits,
    Candidate,
    PlannedWork,
    all_layouts,
    find_candidates,
)
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape
from nanoserve.scheduler.policies import make_policy
from tests.costs.conftest import qwen3_next

WORK = PlannedWork((RequestShape(200, 40), RequestShape(400, 10)) * 20)


def costs_of(model: str, hardware: str) -> Callable[[ParallelLayout], StepCosts]:
    return partial(StepCosts, load_shape(model), load_machine(hardware))


def candidates(
    model: str, hardware: str, gpus: int, work: PlannedWork = WORK
) -> dict[str, Candidate]:
    found = find_candidates(costs_of(model, hardware), gpus, work)
    return {one.name: one for one in found.fitting}


def test_all_ways_to_multiply_three_degrees() -> None:
    assert {layout.name for layout in all_layouts(4)} == {"P4", "T2P2", "T4", "D2P2", "D2T2", "D4"}
    assert all(layout.devices == 12 for layout in all_layouts(12))
    # 2 * 2 * 3: 6 ways to spread 2 twos, 3 to place the three
    assert len(list(all_layouts(12))) == 18
    assert [layout.name for layout in all_layouts(1)] == ["T1"]


def test_every_layout_and_pair_is_a_candidate_or_left_out_with_a_reason() -> None:
    found = find_candidates(costs_of("qwen2.5-32b", "seesaw-a10"), 8, WORK)
    names = {one.name for one in found.fitting} | {one.name for one in found.left_out}
    layouts = [layout.name for layout in all_layouts(8)]
    assert names >= set(layouts)
    reasons = {one.name: one.reason for one in found.left_out}
    assert "GiB more than" in reasons["D8"]
    assert "T8P1" not in names
    assert {"P8->T8", "P8->T4P2", "D2P4->D2T4"} <= {one.name for one in found.fitting}
    # replicas are the same in both
    assert not any("->" in name and name.count("D2") == 1 for name in names)


def test_a_replica_gets_its_share_and_its_own_blocks() -> None:
    found = candidates("qwen3-8b", "l4", 4)
    assert found["D4"].replicas == 4
    assert found["D4"].kv_blocks[0] < found["D2T2"].kv_blocks[0] < found["T4"].kv_blocks[0]
    share = PlannedWork(WORK.shapes, rate=8.0).share(4)
    assert (len(share.shapes), share.rate) == (10, 2.0)
    assert found["D4"].simulate(make_policy("sarathi", 512), 64).requests == 10


def test_windows_count_in_limits_estimates_and_simulations() -> None:
    """Gemma 3 27B on two H100: keeping all, one device holds 43,000 tokens, no prompt of
    100,000."""
    work = PlannedWork((RequestShape(100_000, 20),) * 4)
    found = candidates("gemma-3-27b", "h100", 2, work)
    assert {"D2", "T2", "P2"} <= set(found)
    assert found["D2"].simulate(make_policy("sarathi", 2048), 64).requests == 2
    with pytest.raises(UsageError, match="fewer than the longest request"):
        find_candidates(
            costs_of("gemma-3-27b", "h100"), 1, PlannedWork((RequestShape(400_000, 20),))
        )


def test_two_layouts_leave_behind_what_one_does() -> None:
    """So a prompt that fits into each layout alone fits into the two."""
    work = PlannedWork((RequestShape(16_000, 20),) * 4)
    found = find_candidates(
        costs_of("gemma-3-1b", "seesaw-a10"), 2, work, limits=CacheLimits(device_bytes=2**27)
    )
    names = {one.name for one in found.fitting}
    assert {"P2", "T1P2"} & names and "P2->T2" in names
    assert found.named("P2->T2").simulate(make_policy("seesaw", 2048), 64).requests == 4


def test_caches_keep_to_limits_and_numbers_have_their_bits() -> None:
    model, machine = load_shape("qwen3-8b"), load_machine("seesaw-a10")
    limits = CacheLimits(device_bytes=2**30, host_bytes=2**31)
    found = find_candidates(partial(StepCosts, model, machine), 4, WORK, limits=limits)
    block = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 16 * 2
    assert found.named("P4->T4").kv_blocks == (2**30 // block, 2**30 // block)
    assert found.named("P4->T4").host_blocks == 2**31 // block
    assert found.named("D2P2->D2T2").host_blocks == 2**30 // block  # of each replica
    wide = find_candidates(
        partial(StepCosts, model, machine, precision=Precision(kv_bits=32)), 4, WORK, limits=limits
    )
    assert wide.named("P4->T4").host_blocks == 2**30 // block
    with pytest.raises(UsageError, match="its KV cache holds 0 tokens"):
        find_candidates(
            partial(StepCosts, model, machine), 4, WORK, limits=CacheLimits(device_bytes=2**20)
        )


def test_states_take_their_part_of_memory() -> None:
    """Sequences with a place for their states are as many as fit with the mean request; pairs of
    layouts are left out. Two stages have 18 states each, and keys and values of 6 layers."""
    model, machine = qwen3_next(), load_machine("h200")
    work = PlannedWork((RequestShape(200, 40), RequestShape(400, 32)) * 2000)
    found = find_candidates(partial(StepCosts, model, machine), 2, work)
    assert {one.name for one in found.fitting} == {"P2", "T2"}
    assert (
        "models without recurrent states"
        in {one.name: one.reason for one in found.left_out}["pairs of layouts"]
    )
    costs = found.named("P2").layouts[0]
    states = [costs.counts.state_bytes(stage) for stage in range(2)]
    blocks = [costs.counts.block_bytes(16, stage) for stage in range(2)]
    rooms = [costs.memory.kv_bytes(stage) for stage in range(2)]
    # the mean request of 336 tokens takes 21 blocks
    expected = min(int(rooms[at] // (states[at] + 21 * blocks[at])) for at in range(2))
    assert found.named("P2").states == expected
    assert found.named("P2").kv_blocks == (
        min(int((rooms[at] - expected * states[at]) // blocks[at]) for at in range(2)),
    )
    limit = 10 * (73.6875 * 2**20 + 336 * 24576)
    limited = find_candidates(
        partial(StepCosts, model, machine), 2, work, limits=CacheLimits(device_bytes=limit)
    )
    assert {one.states for one in limited.fitting} == {10}
    assert {one.kv_blocks for one in limited.fitting} == {(210,)}


def test_a_simulated_plan_runs_no_more_sequences_than_have_states() -> None:
    model, machine = qwen3_next(), load_machine("h200")
    work = PlannedWork((RequestShape(32, 20),) * 6)
    found = find_candidates(partial(StepCosts, model, machine), 2, work).named("T2")
    few = replace(found, states=2)
    policy = make_policy("sarathi", 512)
    assert few.simulate(policy, 64).seconds == found.simulate(policy, 2).seconds
    assert few.simulate(policy, 64).seconds > found.simulate(policy, 64).seconds


def test_what_is_estimated_is_near_what_is_simulated() -> None:
    """Near enough to say which are worth simulating: within a factor of two, and the order is that
    of simulation."""
    work = PlannedWork((RequestShape(300, 30),) * 120)
    found = candidates("qwen3-8b", "seesaw-a10", 4, work)
    simulated = {
        name: work.tokens / found[name].simulate(make_policy("throttling", 2048), 2048).seconds
        for name in ("P4", "T4", "D4")
    }
    for name, tokens_per_second in simulated.items():
        assert 0.5 < found[name].tokens_per_second / tokens_per_second < 2, name
    estimated = sorted(simulated, key=lambda name: found[name].tokens_per_second)
    assert estimated[0] == min(simulated, key=simulated.__getitem__)


def test_a_pair_changes_its_layout() -> None:
    pair = candidates("qwen2.5-14b", "seesaw-a10", 4)["P4->T4"]
    assert pair.host_blocks > 0
    result = pair.simulate(make_policy("seesaw", 2048), 2048)
    assert result.transitions >= 1
    assert result.requests == len(WORK.shapes)


def test_at_a_rate_layouts_are_ordered_by_latency_and_none_are_pairs() -> None:
    slow = candidates("qwen3-8b", "seesaw-a10", 4, PlannedWork(WORK.shapes, rate=0.1))
    assert not any(one.is_pair for one in slow.values())
    # alone on the machine, one request is computed by all devices
    assert slow["T4"].latency < slow["P4"].latency
    assert slow["T4"].estimate() < slow["P4"].estimate()
    swamped = candidates("qwen3-8b", "seesaw-a10", 4, PlannedWork(WORK.shapes, rate=1e6))
    assert all(math.isinf(one.latency) for one in swamped.values())
    assert "less than 1e+06 requests a second" in swamped["T4"].estimate_text


def test_the_best_are_kept_and_the_others_left_out_with_their_estimates() -> None:
    found = find_candidates(costs_of("qwen3-8b", "seesaw-a10"), 4, WORK)
    best = found.best(1)
    layout, pair = sorted(best.fitting, key=lambda one: one.is_pair)
    assert pair.is_pair and not layout.is_pair
    assert layout.tokens_per_second == max(
        one.tokens_per_second for one in found.fitting if not one.is_pair
    )
    assert len(best.left_out) == len(found.fitting) - 2 + len(found.left_out)
    assert best.left_out[0].reason.startswith("not simulated: estimated")


def test_pairs_are_left_out_together_where_they_make_no_sense() -> None:
    unknown = find_candidates(costs_of("qwen3-8b", "gllm-l20"), 4, WORK)
    assert [(one.name, one.reason) for one in unknown.left_out] == [
        ("pairs of layouts", "need host memory: none is known")
    ]
    waiting = find_candidates(
        costs_of("qwen3-8b", "seesaw-a10"), 4, PlannedWork(WORK.shapes, rate=1.0)
    )
    assert waiting.left_out[-1].reason == "are for closed batches: without a rate"


def test_quantiles_of_answers_end_with_the_longest() -> None:
    work = PlannedWork(tuple(RequestShape(1, length) for length in (5, 1, 4, 2, 3)))
    assert work.output_quantiles(64) == [1, 2, 3, 4, 5]
    assert work.output_quantiles(2) == [2, 5]


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "work", "says"),
    [
        ("llama-2-70b", "a10", 2, WORK, "more than the 19.8 GiB that can be used"),
        ("llama-2-70b", "a10", 2, WORK, "what would fit: 7 devices (layout P7) or 4-bit weights"),
        ("qwen3-8b", "l4", 1, PlannedWork((RequestShape(10**6, 1),)), "than the longest request"),
    ],
)
def test_nothing_fits_says_by_how_much(
    model: str, machine: str, gpus: int, work: PlannedWork, says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        find_candidates(costs_of(model, machine), gpus, work)
    assert says in str(refused.value)
