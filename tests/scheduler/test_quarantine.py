"""Requests that kill workers fail alone, innocent ones get their tokens, and a machine at fault is
given up."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.request import FinishReason, Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.plan import Begin, Row
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.utils.quarantine import Quarantine
from tests.fakes.dying_executor import CAUSE, DyingExecutor
from tests.fakes.integrity import check_integrity
from tests.fakes.reference import expected_tokens
from tests.scheduler.lives import check_outputs, live, lives

POISON = 49
"""A prompt that begins with it kills."""
NUM_BLOCKS, BLOCK_SIZE, CONTEXT = 32, 4, 40


def kills_at(position: int) -> Any:
    """Whoever computes that position of a poisoned sequence, or one behind it, is dead."""

    def kills(begin: Begin, row: Row) -> bool:
        return begin.tokens[0] == POISON and row.start + max(1, len(row.tokens)) > position

    return kills


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    life=lives(),
    poisoned=st.sets(st.integers(0, 6), min_size=1, max_size=3),
    position=st.integers(0, 8),
)
def test_no_innocent_request_fails(
    policy: str, life: dict, poisoned: set[int], position: int
) -> None:
    arrivals = [
        replace(one, request=replace(one.request, prompt=(POISON, *one.request.prompt[1:])))
        if number in poisoned
        else one
        for number, one in enumerate(life["arrivals"])
    ]
    killers = {one.request.request_id for one in arrivals if one.request.prompt[0] == POISON}
    executor = DyingExecutor(
        life["num_blocks"],
        life["block_size"],
        depth=life["depth"],
        async_scheduling=life["async_scheduling"],
        kills=kills_at(position),
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
    engine = Engine(scheduler, executor, vocab_size=50)
    outputs, reasons = live(engine, arrivals)
    check_outputs(arrivals, life["max_model_len"], outputs, reasons, executor.losses)
    failed = {name for (name, _), reason in reasons.items() if reason is FinishReason.ERROR}
    assert failed <= killers
    assert engine.losses <= 3 * len(killers), "nobody kills a fourth time"
    assert engine.failure is None
    assert scheduler.pool.free_blocks == life["num_blocks"] and not scheduler.waiting


# -------------------------------------------------------------------------------------------------
# one by one


class Bench:
    """An engine whose workers are killed by the prompts of `kill`."""

    def __init__(self, *, ran: float = 1.0) -> None:
        self.executor = DyingExecutor(NUM_BLOCKS, BLOCK_SIZE, ran=ran, kills=kills_at(0))
        self.scheduler = Scheduler(
            ChunkedPrefill(64), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=CONTEXT
        )
        self.engine = Engine(self.scheduler, self.executor, vocab_size=1000)
        self.got: dict[str, list[int]] = {}
        self.errors: dict[str, str] = {}
        self.ended: list[str] = []

    def add(self, name: str, *, first: int = 1) -> Request:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        request = Request(name, (first, 2, 3), params, seed=0)
        self.engine.add(request)
        return request

    def kill(self, name: str) -> None:
        self.add(name, first=POISON)

    def step(self) -> None:
        for update in self.engine.step():
            self._take(update)
        check_integrity(self.scheduler)

    def _take(self, update: SequenceUpdate) -> None:
        self.got.setdefault(update.request_id, []).extend(update.new_tokens)
        if update.finished:
            self.ended.append(update.request_id)
            if update.sequence.error is not None:
                self.errors[update.request_id] = update.sequence.error

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()

    def running(self) -> set[str]:
        return {sequence.request.request_id for sequence in self.scheduler.running}


def test_suspects_run_one_at_a_time_and_the_one_that_kills_alone_fails_alone() -> None:
    bench = Bench()
    requests = [bench.add(name) for name in "ab"]
    bench.kill("killer")
    requests.append(bench.add("c"))
    while bench.engine.losses < 2:
        bench.step()
    late = bench.add("late")
    assert bench.engine.status.waiting == 5, "those held back wait too"
    while bench.engine.has_work:
        bench.step()
        assert bench.engine.losses == 3 or len(bench.running()) <= 1
    assert bench.engine.losses == 3
    assert bench.errors == {
        "killer": (
            f"the workers died whenever this request ran, and at last when it ran alone: {CAUSE}"
        )
    }
    assert bench.ended[:3] == ["a", "b", "killer"], "the others wait until nobody is suspected"
    for request in (*requests, late):
        assert (
            bench.got[request.request_id]
            == expected_tokens(request, index=0, max_model_len=CONTEXT)[0]
        )


def test_two_deaths_cost_a_request_nothing() -> None:
    executor = DyingExecutor(NUM_BLOCKS, BLOCK_SIZE, deaths=[2, 5])
    bench = Bench()
    bench.engine = Engine(bench.scheduler, executor, vocab_size=1000)
    request = bench.add("alone")
    bench.finish()
    assert executor.losses == 2
    assert bench.got["alone"] == expected_tokens(request, index=0, max_model_len=CONTEXT)[0]


def test_a_suspect_that_is_given_up_makes_room_for_the_next() -> None:
    bench = Bench()
    bench.add("a")
    bench.kill("killer")
    while bench.engine.losses < 2:
        bench.step()
    bench.engine.stop("a")
    bench.engine.stop("killer")
    bench.add("b")
    bench.finish()
    assert bench.engine.losses == 2 and bench.ended == ["b"]


def test_culprits_do_not_count_towards_the_limit() -> None:
    bench = Bench(ran=1.0)
    for number in range(5):
        bench.kill(f"killer {number}")
        bench.finish()
        bench.add(f"innocent {number}")
        bench.finish()
    assert bench.engine.losses == 15 and bench.engine.failure is None
    assert set(bench.errors) == {f"killer {number}" for number in range(5)}


def test_three_culprits_in_a_row_are_the_fault_of_the_machine() -> None:
    bench = Bench(ran=1.0)
    for name in ("one", "two", "three"):
        bench.kill(name)
    bench.add("innocent")
    bench.engine.scheduler.table.max_num_seqs = 1
    bench.finish()
    assert bench.engine.failure is not None
    assert bench.engine.failure.startswith("the workers died 3 times within ")
    assert bench.errors["three"] == bench.errors["innocent"] == bench.engine.failure
    assert "when it ran alone" in bench.errors["one"] and "when it ran alone" in bench.errors["two"]
    bench.add("later")
    bench.finish()
    assert bench.errors["later"] == bench.engine.failure


def test_culprits_that_are_far_apart_are_only_that() -> None:
    bench = Bench(ran=31.0)
    for number in range(5):
        bench.kill(f"killer {number}")
        bench.finish()
    assert bench.engine.failure is None and len(bench.errors) == 5


def test_workers_that_die_without_a_culprit_three_times_are_given_up() -> None:
    """While they are starting, say: plans have not reached them, and whoever waits is not
    suspected."""
    bench = Bench(ran=0.0)
    executor = DyingExecutor(NUM_BLOCKS, BLOCK_SIZE, deaths=[1, 3, 5], ran=0.0)
    bench.engine = Engine(bench.scheduler, executor, vocab_size=1000)
    bench.add("a")
    bench.add("b")
    bench.step()
    bench.step()
    assert bench.engine.failure is None and bench.scheduler.table.quarantine.suspect is None
    bench.step()
    assert bench.errors == dict.fromkeys("ab", str(bench.engine.failure))
    assert str(bench.engine.failure).endswith(f"the last time {CAUSE}")


# --------------------------------------------------------------------------------------------------
# the limit


def test_the_limit_counts_running_and_tells_the_whole_time() -> None:
    """Large models take longer to start than three deaths may take, and the message says how long
    it really was."""
    deaths = Quarantine()
    for now, ran in ((100.0, 5000.0), (190.0, 5.0)):
        assert deaths.on_death(("a", "b"), now, ran=ran) is None
        assert deaths.exhausted is None
    deaths.on_death((), 280.4, ran=0.0)
    assert deaths.exhausted == "3 times within 181 s"


def test_deaths_that_are_far_apart_go_on_for_ever() -> None:
    deaths = Quarantine()
    for number in range(100):
        deaths.on_death((f"{number}",), 40.0 * number, ran=40.0)
        assert deaths.exhausted is None


def test_deaths_at_once_are_not_told_to_have_taken_no_time() -> None:
    deaths = Quarantine()
    for _ in range(3):
        deaths.on_death((), 7.0, ran=0.0)
    assert deaths.exhausted == "3 times within 1 s"
