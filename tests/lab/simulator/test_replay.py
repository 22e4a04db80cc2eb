"""A run on the machine's own clock and its replay in virtual time make the same plans."""

import random
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.lab.simulator.replay import record_run, replay
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.recurrent_state.recurrent_state import RecurrentState
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.host_losing_executor import HostLosingExecutor
from tests.scheduler.tier_lives import AlsoUsingTheHost

NUM_BLOCKS, BLOCK_SIZE = 24, 4


class RealTimeExecutor(HostLosingExecutor):
    """Lets real time pass: a plan takes a millisecond or so more than the one before it.

    Workers die at the plans of these numbers, and perhaps when there is nothing to do for the first
    time.
    """

    def __init__(
        self,
        depth: int,
        seed: int,
        deaths: Collection[int] = (),
        *,
        dies_idle: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, depth=depth, **settings)
        self._last_plans = frozenset(deaths)
        self._dies_idle = dies_idle
        self._random = random.Random(seed)
        self._began = time.perf_counter()
        self._free = 0.0
        self._ends: deque[float] = deque()

    def now(self) -> float:
        return time.perf_counter() - self._began

    def submit(self, plan: StepPlan) -> None:
        if plan.step in self._last_plans:
            self.die()
        super().submit(plan)
        if self.dead or not plan.ends:
            return
        self._free = max(self._free, self.now()) + self._random.uniform(0.0002, 0.002)
        self._ends.append(self._free)

    def die(self) -> None:
        super().die()
        self._ends.clear()

    def collect(self, until: float | None) -> list[StepResult]:
        if self._dies_idle and not self._ends:
            self._dies_idle = False
            self.die()
        moments = [*list(self._ends)[:1], *([] if until is None else [until])]
        if self.dead or not moments:  # only swaps are under way
            return super().collect(None)
        time.sleep(max(0.0, min(moments) - self.now()))
        results = []
        while self._ends and self._ends[0] <= self.now():
            self._ends.popleft()
            results += super().collect(None)
        return results


def _requests(seed: int) -> list[Request]:
    generator, now, requests = random.Random(seed), 0.0, []
    for number in range(25):
        now += generator.expovariate(300)
        prompt = tuple(generator.choices(range(3), k=generator.randint(1, 30)))
        params = SamplingParams(
            temperature=generator.choice([0.0, 1.0]),
            n=generator.choice([1, 1, 2]),
            max_tokens=generator.randint(1, 25),
        )
        requests.append(
            Request(f"r{number}", prompt, params, number, end_tokens=(0,), arrival_time=now)
        )
    return requests


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_makes_the_plans_of_the_run(policy: str, depth: int) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(
            make_policy(policy, 16),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            pipeline_depth=depth,
        )

    record = record_run(
        Engine(scheduler(), RealTimeExecutor(depth, seed=depth), vocab_size=50), _requests(depth)
    )
    assert len(record.arrivals) == 25
    assert len(record.plans) > 50
    assert replay(record, scheduler, vocab_size=50) == record.plans


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_deaths_of_workers_are_recorded_and_replayed(depth: int) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(
            make_policy("throttling", 16),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            pipeline_depth=depth,
        )

    # The first comes after a while, in which there surely is nothing to do.
    requests = [
        replace(request, arrival_time=request.arrival_time + 0.3) for request in _requests(depth)
    ]
    executor = RealTimeExecutor(depth, seed=depth, deaths=(3, 20, 50), dies_idle=True)
    record = record_run(Engine(scheduler(), executor, vocab_size=50), requests)
    assert sum(result.lost is not None for result in record.result_of.values()) == 3
    assert len(record.losses) == 4
    assert replay(record, scheduler, vocab_size=50) == record.plans


@pytest.mark.parametrize("depth", [1, 3])
def test_what_became_of_the_host_is_recorded_and_replayed(depth: int) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(
            AlsoUsingTheHost(make_policy("sarathi", 16)),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            pipeline_depth=depth,
            extensions=make_extensions(host_blocks=NUM_BLOCKS),
        )

    executor = RealTimeExecutor(depth, seed=depth, host_blocks=NUM_BLOCKS, host_losses=(70, 150))
    record = record_run(Engine(scheduler(), executor, vocab_size=50), _requests(depth))
    told = list(record.results)
    assert sum(result.host.lost is not None for result in told) == 2
    assert any(result.host.swapped for result in told)
    assert sum(row.host is not None for plan in record.plans for row in plan.rows) > 10
    assert replay(record, scheduler, vocab_size=50) == record.plans


@pytest.mark.parametrize("depth", [1, 3])
def test_a_run_with_recurrent_states_is_replayed(depth: int) -> None:
    def scheduler() -> Scheduler:
        return Scheduler(
            make_policy("sarathi", 16),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=64,
            pipeline_depth=depth,
            extensions=Extensions(state=RecurrentState(9, chunk=8)),
        )

    executor = RealTimeExecutor(depth, seed=depth, state_slots=9)
    record = record_run(Engine(scheduler(), executor, vocab_size=50), _requests(depth))
    assert sum(len(row.saves) for plan in record.plans for row in plan.state.rows) > 10
    assert replay(record, scheduler, vocab_size=50) == record.plans


def test_a_replay_with_another_policy_is_found_out() -> None:
    def scheduler(policy: str) -> Scheduler:
        return Scheduler(
            make_policy(policy, 16), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=64
        )

    record = record_run(
        Engine(scheduler("sarathi"), RealTimeExecutor(1, seed=0), vocab_size=50), _requests(0)
    )
    with pytest.raises(ValueError, match=r"step \d+ of the replay is not that of the record"):
        replay(record, lambda: scheduler("decode-first"), vocab_size=50)
