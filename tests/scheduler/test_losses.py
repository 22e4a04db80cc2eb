"""Workers die at any moment: nobody who listens to a sequence can tell, and no block is lost."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.errors import WorkersFailed
from nanoserve.request import FinishReason, Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.dying_executor import CAUSE, DyingExecutor
from tests.fakes.integrity import check_integrity, host_pool
from tests.fakes.reference import expected_tokens
from tests.scheduler import tiered
from tests.scheduler.lives import check_outputs, live, lives
from tests.scheduler.tier_lives import DECIDED, TIERS, AlsoUsingTheHost, AtRandom, check

DEATHS = st.frozensets(st.one_of(st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=6)
NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 16, 4, 40

# ----------------------------------------------------------------------------------------------
# random lives


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(life=lives(), deaths=DEATHS)
def test_every_request_gets_the_tokens_it_would_get_alone(
    policy: str, life: dict, deaths: frozenset[int]
) -> None:
    executor = DyingExecutor(
        life["num_blocks"],
        life["block_size"],
        depth=life["depth"],
        async_scheduling=life["async_scheduling"],
        deaths=deaths,
    )
    scheduler = Scheduler(
        make_policy(policy, life["token_budget"]),
        num_blocks=life["num_blocks"],
        block_size=life["block_size"],
        max_model_len=life["max_model_len"],
        max_num_seqs=life["max_num_seqs"],
        prefix_caching=life["prefix_caching"],
        pipeline_depth=life["depth"],
        async_scheduling=life["async_scheduling"],
    )
    outputs, reasons = live(Engine(scheduler, executor, vocab_size=50), life["arrivals"])
    check_outputs(life["arrivals"], life["max_model_len"], outputs, reasons, executor.losses)
    assert scheduler.pool.free_blocks == life["num_blocks"]
    assert not scheduler.waiting


@settings(max_examples=50, deadline=None)
@given(life=lives(), memory=TIERS, decided=DECIDED, deaths=DEATHS)
def test_host_memory_and_layouts_are_lost_too(
    life: dict, memory: dict, decided: list[Decision], deaths: frozenset[int]
) -> None:
    check(AtRandom(decided), life, memory, deaths)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=10, deadline=None)
@given(life=lives(), memory=TIERS, deaths=DEATHS)
def test_every_policy_with_host_decodes_beside_it(
    name: str, life: dict, memory: dict, deaths: frozenset[int]
) -> None:
    check(AlsoUsingTheHost(make_policy(name, life["token_budget"])), life, memory, deaths)


# -------------------------------------------------------------------------------------------------
# one by one


class _Bench:
    """An engine of so many stages, whose workers die at these calls of its executor."""

    def __init__(self, *deaths: int, depth: int = 2, executor: Any = None, **settings: Any) -> None:
        self.executor = executor or DyingExecutor(
            NUM_BLOCKS, BLOCK_SIZE, depth=depth, deaths=deaths
        )
        self.scheduler = Scheduler(
            ChunkedPrefill(64),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=CONTEXT,
            pipeline_depth=depth,
            **settings,
        )
        self.engine = Engine(self.scheduler, self.executor, vocab_size=1000)

    def add(self, name: str, length: int = 9, **params: Any) -> Request:
        settings = SamplingParams(
            **({"temperature": 0, "max_tokens": 8, "ignore_eos": True} | params)
        )
        request = Request(name, tuple(range(length)), settings, seed=0)
        self.engine.add(request)
        return request

    def finish(self) -> list[SequenceUpdate]:
        updates = []
        while self.engine.has_work:
            updates += self.engine.step()
            check_integrity(self.scheduler)
        assert self.scheduler.pool.free_blocks == NUM_BLOCKS
        return updates


def _tokens(updates: list[SequenceUpdate], index: int = 0) -> list[int]:
    return [token for update in updates if update.index == index for token in update.new_tokens]


def test_a_sequence_begins_again_with_the_tokens_it_has() -> None:
    bench = _Bench(6, depth=1)  # in the third collect
    request = bench.add("r")
    updates = bench.finish()
    whole = expected_tokens(request, max_model_len=CONTEXT)[0]
    assert _tokens(updates) == whole
    begins = [begin for plan in bench.executor.plans for begin in plan.begin]
    assert [begin.tokens for begin in begins] == [request.prompt, (*request.prompt, *whole[:3])]
    assert not any(plan.end for plan in bench.executor.plans), "nobody knows of the one who is gone"
    assert bench.scheduler.table.preemptions == 1


def test_no_block_is_found_by_what_it_held_before() -> None:
    bench = _Bench(depth=1)
    bench.add("first", max_tokens=1)
    bench.finish()
    bench.add("second", max_tokens=1)
    bench.executor.die()
    bench.finish()
    bench.add("third", max_tokens=1)
    (update,) = bench.finish()
    rows = [row for plan in bench.executor.plans for row in plan.rows]
    # The second found the first one's blocks; then it was computed whole, and the third finds what
    # it left.
    assert [(row.start, len(row.tokens)) for row in rows] == [(0, 9), (8, 1), (0, 9), (8, 1)]
    assert update.sequence.cached_tokens == 8


def test_workers_that_die_while_there_is_nothing_to_do_take_the_cache_with_them() -> None:
    bench = _Bench()
    bench.add("first", max_tokens=1)
    bench.finish()
    bench.executor.die()
    bench.engine.step(until=bench.engine.now())
    bench.add("second", max_tokens=1)
    (update,) = bench.finish()
    assert update.sequence.cached_tokens == 0
    assert bench.engine.losses == 1


def test_siblings_fork_again_or_are_computed_alone() -> None:
    for death in range(1, 12):
        bench = _Bench(death)
        request = bench.add("r", n=3, temperature=1)
        updates = bench.finish()
        assert bench.executor.losses == 1
        for index in range(3):
            assert (
                _tokens(updates, index)
                == expected_tokens(request, index=index, max_model_len=CONTEXT)[0]
            )


def test_a_request_given_up_while_in_flight_is_gone_with_the_workers() -> None:
    bench = _Bench()
    bench.add("a")
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    bench.executor.submit(plan)
    bench.engine.stop("a")
    assert bench.engine.has_work, "its blocks come back with its answer"
    bench.executor.die()
    bench.engine.step()
    check_integrity(bench.scheduler)
    assert not bench.engine.has_work
    bench.add("a")  # its name is free again
    assert bench.finish()[-1].finished


def test_host_sequences_whose_token_was_under_way_are_computed_again() -> None:
    bench = tiered.Bench()
    for name in "ab":
        bench.add(name, 4, 4)
    bench.step(Decision(64, 0, host=HostDecision(park=True)))
    bench.step(Decision(64, 64, host=HostDecision(strategy="overlap", decodes=(1, 0))))
    bench.executor.die()
    bench.step()
    assert host_pool(bench.scheduler).free_blocks == host_pool(bench.scheduler).num_blocks
    bench.step()
    assert (bench.load.host.cohorts, bench.load.host.decodes, bench.load.running_decodes) == (
        (),
        0,
        0,
    )
    bench.finish()


@pytest.mark.parametrize("target", [0, 1])
def test_a_transition_that_was_lost_is_decided_anew(target: int) -> None:
    """Else the policy would go on wanting it, and who waits be computed in forced steps, a block at
    a time."""
    bench = tiered.Bench()
    bench.scheduler.policy = TransitionMinimizing(64)
    for name in "abcdef":
        bench.add(name, 9, 4)
    while not (bench.plans and bench.plans[-1].layouts.transition == target):
        plan = bench.scheduler.schedule(0.0)
        if plan is not None:
            bench.executor.submit(plan)
            if plan.layouts.transition == target:
                bench.executor.die()
        bench.step()
    bench.finish()
    assert bench.executor.losses == 1
    assert bench.scheduler.forced_steps == 0


# ----------------------------------------------------------------------------------------- no
# workers any more


class _GivingUp(DyingExecutor):
    """Its workers die for good."""

    gone = False

    def submit(self, plan: StepPlan) -> None:
        self._check()
        super().submit(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        self._check()
        return super().collect(until)

    def _check(self) -> None:
        if self.gone:
            raise WorkersFailed(CAUSE)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_everything_ends_with_an_error_when_no_workers_come_any_more(steps: int) -> None:
    executor = _GivingUp(NUM_BLOCKS, BLOCK_SIZE, depth=2)
    bench = _Bench(executor=executor, max_num_seqs=2)
    bench.add("a")
    bench.add("family", n=3, temperature=1)
    bench.add("waits")
    for _ in range(steps):
        bench.engine.step()
    assert bench.engine.failure is None
    executor.gone = True
    updates = bench.engine.step()
    ended = [(update.request_id, update.index) for update in updates]
    assert ended == [("a", 0), ("family", 0), ("family", 1), ("family", 2), ("waits", 0)]
    for update in updates:
        assert (
            update.sequence.finish_reason is FinishReason.ERROR and update.sequence.error == CAUSE
        )
    assert bench.engine.failure == CAUSE
    assert not bench.engine.has_work and bench.scheduler.pool.free_blocks == NUM_BLOCKS
    check_integrity(bench.scheduler)


def test_a_request_that_comes_later_ends_in_the_same_way() -> None:
    executor = _GivingUp(NUM_BLOCKS, BLOCK_SIZE)
    executor.gone = True
    bench = _Bench(executor=executor)
    for name in ("a", "b"):
        bench.add(name)
        (update,) = bench.engine.step()
        assert (update.request_id, update.sequence.error) == (name, CAUSE)
