"""Several engines that look like one: each request gets what it would get alone, whatever becomes
of the others."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanoserve.engine.dispatcher import Dispatcher
from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure, UsageError, WorkersFailed
from nanoserve.lab.simulator import Workload, lognormal_lengths, poisson_arrivals
from nanoserve.lab.simulator.executor import SimulatedExecutor
from nanoserve.lab.simulator.simulation import simulate
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.dying_executor import DyingExecutor
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.fakes.reference import expected_tokens
from tests.lab.simulator.linear_times import LinearTimes
from tests.scheduler.lives import Arrival, check_outputs, live, lives

NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 32, 4, 64
FAILED = "the workers died 3 times"


def request(name: str, prompt: int = 8, tokens: int = 6, *, samples: int = 1) -> Request:
    params = SamplingParams(temperature=1.0, max_tokens=tokens, n=samples, ignore_eos=True)
    return Request(name, tuple(range(1, prompt + 1)), params, seed=len(name))


def engine(executor: Executor | None = None, policy: str = "sarathi", **sizes: Any) -> Engine:
    scheduler = Scheduler(
        make_policy(policy, sizes.pop("token_budget", 16)),
        **{"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": CONTEXT, **sizes},
    )
    return Engine(
        scheduler, executor or MemoryCheckingExecutor(NUM_BLOCKS, BLOCK_SIZE), vocab_size=50
    )


class Fleet(Dispatcher):
    """Over fakes, which never make anybody wait; takes notes of the times until which it would have
    waited."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.waits: list[float | None] = []
        super().__init__(engines, self.waits.append)

    def check(self) -> None:
        for one in self.engines:
            check_integrity(one.scheduler)
            assert one.scheduler.table.outstanding >= 0

    def run(self) -> dict[tuple[str, int], tuple[list[int], str | None]]:
        """To the end of everything; what each sequence got, and its error."""
        got: dict[tuple[str, int], tuple[list[int], str | None]] = {}
        while self.has_work:
            for update in self.step():
                got[update.request_id, update.index] = (
                    update.sequence.output_tokens,
                    update.sequence.error,
                )
        assert [one.scheduler.table.outstanding for one in self.engines] == [0] * len(self.engines)
        return got


class FailingExecutor(MemoryCheckingExecutor):
    """Its workers have died for good when so many plans have been submitted."""

    def __init__(self, plans: int) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE)
        self._left = plans

    def submit(self, plan: StepPlan) -> None:
        if self._left == 0:
            raise WorkersFailed(FAILED)
        self._left -= 1
        super().submit(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        if self._left == 0:
            raise WorkersFailed(FAILED)
        return super().collect(until)


# -------------------------------------------------------------------------------------------------
# answers


TWO_TOKENS = Request("r0", (1,), SamplingParams(max_tokens=2, ignore_eos=True), seed=0)
TWO_STEPS = {
    "block_size": 1,
    "num_blocks": 6,
    "max_model_len": 5,
    "arrivals": [Arrival(0, TWO_TOKENS, None, None)],
    "prefix_caching": False,
    "depth": 1,
    "async_scheduling": False,
    "max_num_seqs": 1,
    "token_budget": 1,
}


@pytest.mark.parametrize("policy", ["sarathi", "throttling"])
@settings(max_examples=30, deadline=None)
@example(life=TWO_STEPS, number=1, deaths=frozenset({4}))  # the collect that brings the last answer
@given(life=lives(), number=st.integers(1, 3), deaths=st.frozensets(st.integers(1, 30), max_size=3))
def test_every_request_gets_what_it_would_get_alone(
    policy: str, life: dict, number: int, deaths: frozenset[int]
) -> None:
    """Forks, aborts and small pools included; in the first engine workers die."""
    sizes = {
        name: life[name]
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "token_budget")
    }
    executors = [
        DyingExecutor(
            life["num_blocks"],
            life["block_size"],
            depth=life["depth"],
            async_scheduling=life["async_scheduling"],
            deaths=() if place else deaths,
        )
        for place in range(number)
    ]
    others = {"pipeline_depth": life["depth"], "async_scheduling": life["async_scheduling"]}
    fleet = Fleet(
        [
            engine(one, policy, prefix_caching=life["prefix_caching"], **sizes, **others)
            for one in executors
        ]
    )
    outputs, reasons = live(fleet, life["arrivals"], fleet.check)
    check_outputs(life["arrivals"], life["max_model_len"], outputs, reasons, executors[0].losses)
    status = fleet.status
    assert status.free_blocks == status.total_blocks == number * life["num_blocks"]
    assert status.output_tokens == sum(map(len, outputs.values()))
    first = executors[0]
    assert status.losses == first.reported_losses
    # A death that comes with the last answer is not reported: without work no engine here is asked
    # for news.
    assert bool(first.losses) == bool(first.reported_losses or first.dead)
    assert [one.scheduler.table.outstanding for one in fleet.engines] == [0] * number


def test_workers_that_die_for_good_end_the_requests_of_their_engine_alone() -> None:
    fleet = Fleet([engine(FailingExecutor(plans=4)), engine()])
    for number in range(6):
        fleet.add(request(f"r{number}"))
    got = fleet.run()
    assert sorted(key for key, (_, error) in got.items() if error == FAILED) == [
        ("r0", 0),
        ("r2", 0),
        ("r4", 0),
    ]
    for name in ("r1", "r3", "r5"):
        assert got[name, 0] == (
            expected_tokens(request(name), index=0, max_model_len=CONTEXT)[0],
            None,
        )
    assert fleet.failure is None and [one.failure for one in fleet.engines] == [FAILED, None]
    fleet.add(request("later"))
    fleet.add(request("last"))
    assert [error for _, error in fleet.run().values()] == [None, None]
    assert fleet.engines[1].status.output_tokens == 5 * 6


def test_when_no_engine_lives_everything_ends_with_the_reason() -> None:
    fleet = Fleet([engine(FailingExecutor(plans=2)), engine(FailingExecutor(plans=3))])
    for number in range(4):
        fleet.add(request(f"r{number}"))
    assert {error for _, error in fleet.run().values()} == {FAILED}
    assert fleet.failure == FAILED
    fleet.add(request("later"))
    assert fleet.run() == {("later", 0): ([], FAILED)}


def test_a_step_that_fails_ends_what_is_in_flight_there_and_nothing_else() -> None:
    class RunsOut(MemoryCheckingExecutor):
        def collect(self, until: float | None) -> list[StepResult]:
            if len(self.plans) == 3:
                self.forget_what_is_in_flight()
                self.plans.clear()
                raise RuntimeFailure("out of memory")
            return super().collect(until)

    fleet = Fleet([engine(), engine(RunsOut(NUM_BLOCKS, BLOCK_SIZE))])
    fleet.add(request("r0"))
    fleet.add(request("r1"))
    got = fleet.run()
    assert [got["r0", 0][1], got["r1", 0][1]] == [None, "out of memory"]
    assert fleet.failure is None


# -------------------------------------------------------------------------------------------------
# routing


def test_a_request_goes_where_the_fewest_tokens_are_outstanding() -> None:
    fleet = Fleet([engine(), engine(), engine()])
    for name, prompt in (("long", 30), ("middle", 12), ("short", 5), ("next", 5), ("last", 4)):
        fleet.add(request(name, prompt))
    assert [one.scheduler.table.outstanding for one in fleet.engines] == [30, 12, 5 + 5 + 4]
    assert fleet.status.waiting == 5
    fleet.run()
    fleet.add(request("again"))
    assert [one.scheduler.table.outstanding for one in fleet.engines] == [8, 0, 0]


def test_answers_count_until_the_last_sample_has_ended() -> None:
    fleet = Fleet([engine(), engine()])
    fleet.add(request("three", 8, 6, samples=3))
    seen = []
    while fleet.has_work:
        fleet.step()
        seen.append(fleet.engines[0].scheduler.table.outstanding)
        if len(seen) == 4:
            fleet.stop("three", index=1)
    assert max(seen) > 8 + 2 * 6 - 3 and seen[-1] == 0
    assert seen[:-1] == sorted(seen[:-1])
    assert fleet.engines[1].scheduler.steps == 0, "all samples of a request are in one engine"
    assert fleet.status.prompt_tokens == 8


def test_an_id_in_use_is_refused_wherever_it_runs_and_stopped_there() -> None:
    fleet = Fleet([engine(), engine()])
    fleet.add(request("one"))
    with pytest.raises(UsageError, match="request id 'one' is in use"):
        fleet.add(request("one"))
    fleet.add(request("two"))
    assert [update.finished for update in fleet.stop("two")] == [True]
    assert fleet.stop("two") == [] and fleet.stop("never seen") == []
    assert [one.scheduler.table.outstanding for one in fleet.engines] == [8, 0]
    fleet.add(request("two"))
    assert set(fleet.run()) == {("one", 0), ("two", 0)}


def test_what_can_never_run_is_refused_and_not_counted() -> None:
    fleet = Fleet([engine(), engine()])
    with pytest.raises(UsageError, match="token id 99 is not in the vocabulary"):
        fleet.add(Request("bad", (99,), SamplingParams(), seed=0))
    with pytest.raises(UsageError):
        fleet.add(request("long", CONTEXT + 1))
    assert not fleet.has_work and [one.scheduler.table.outstanding for one in fleet.engines] == [
        0,
        0,
    ]


def test_a_simulated_fleet_routes_as_a_real_one_does() -> None:
    times = LinearTimes(num_stages=2, step=0.01, decode=0.0003, prompt_token=0.0002)
    workload = list(
        Workload(poisson_arrivals(25.0, seed=3), lognormal_lengths(150, 50, 1.2, 1.0, seed=4), 150)
    )
    sizes = {"num_blocks": 300, "block_size": 16}
    simulated = simulate(
        make_policy("throttling", 256),
        times,
        workload,
        **sizes,
        max_num_seqs=64,
        replicas=3,
        router="least-tokens",
    )
    engines = [
        engine(
            SimulatedExecutor(times),
            "throttling",
            **sizes,
            token_budget=256,
            max_model_len=300 * 16,
            max_num_seqs=64,
            prefix_caching=False,
            pipeline_depth=2,
        )
        for _ in range(3)
    ]
    fleet = Fleet(engines)
    routed = [[0, 0] for _ in engines]
    for arrival in workload:
        for one in engines:
            while one.now() < arrival.arrival_time:
                one.step(arrival.arrival_time)
        before = [one.scheduler.table.outstanding for one in engines]
        fleet.add(arrival)
        chosen = next(
            place
            for place, one in enumerate(engines)
            if one.scheduler.table.outstanding != before[place]
        )
        routed[chosen][0] += 1
        routed[chosen][1] += len(arrival.prompt)
    assert routed == [[replica.requests, replica.input_tokens] for replica in simulated.replicas]
    assert min(requests for requests, _ in routed) > 30


# ------------------------------------------------------------------------------------------------
# waiting


def test_it_waits_for_news_and_for_nothing_else() -> None:
    fleet = Fleet([engine(), engine()])
    assert fleet.step() == [] and fleet.waits == [], "with nothing to do nothing will come"
    fleet.step(5.0)
    assert fleet.waits == [5.0], "but time passes"
    fleet.add(request("one"))
    fleet.step()
    assert fleet.waits == [5.0, None]
    fleet.step(7.0)
    assert fleet.waits == [5.0, None, 7.0]


def test_an_engine_without_work_is_asked_for_news_of_its_workers() -> None:
    idle = DyingExecutor(NUM_BLOCKS, BLOCK_SIZE, deaths=[3])
    fleet = Fleet([engine(), engine(idle)])
    fleet.add(request("one"))
    assert fleet.run()["one", 0][1] is None
    assert (fleet.losses, idle.losses) == (1, 1)


def test_all_engines_are_closed_even_if_one_complains() -> None:
    class Complaining(MemoryCheckingExecutor):
        def close(self) -> None:
            super().close()
            raise RuntimeFailure("the trace is not complete")

    executors = [
        kind(NUM_BLOCKS, BLOCK_SIZE)
        for kind in (MemoryCheckingExecutor, Complaining, MemoryCheckingExecutor)
    ]
    with pytest.raises(RuntimeFailure, match="the trace is not complete"):
        Fleet([engine(one) for one in executors]).close()
    assert [one.closed for one in executors] == [True] * 3


def test_the_status_of_several_is_the_sum() -> None:
    fleet = Fleet([engine(), engine()])
    for name in ("a", "b", "c"):
        fleet.add(request(name, samples=2))
    fleet.step()
    ended = fleet.stop("a")
    assert [update.sequence.finish_reason for update in ended] == [FinishReason.ABORT] * 2
    status, parts = fleet.status, [one.status for one in fleet.engines]
    for name in ("running", "waiting", "free_blocks", "prompt_tokens", "output_tokens", "steps"):
        assert getattr(status, name) == sum(getattr(part, name) for part in parts), name
    assert (status.layouts, status.total_blocks) == ((0, 0), 2 * NUM_BLOCKS)
