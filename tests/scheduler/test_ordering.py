"""Which requests go first: the orders, aging, fair shares, and random ranks on tiny pools."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.errors import UsageError
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import POLICIES, Decision, Policy, make_policy
from nanoserve.scheduler.ordering import MOST_USERS, Ordering
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor
from tests.scheduler.lives import check_outputs, live, lives
from tests.scheduler.tier_lives import DECIDED, TIERS, AtRandom
from tests.scheduler.tier_lives import check as check_on_two_tiers


def request(name: str, length: int = 4, *, tokens: int = 2, **fields) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, (1,) * length, params, seed=0, **fields)


class Bench:
    """An engine for one sequence at a time unless told otherwise, and the order in which its
    requests begin."""

    def __init__(self, policy: Policy, *, num_blocks: int = 64, max_num_seqs: int = 1) -> None:
        self.scheduler = Scheduler(
            policy,
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=64,
            max_num_seqs=max_num_seqs,
            prefix_caching=False,
        )
        self.engine = Engine(self.scheduler, MemoryCheckingExecutor(num_blocks, 4), vocab_size=50)
        self.begun: dict[str, int] = {}  # step of each request's first plan

    def step(self) -> None:
        self.engine.step()
        check_integrity(self.scheduler)
        for sequence in self.scheduler.table.sequences.values():
            if sequence.first_scheduled_time is not None:
                self.begun.setdefault(sequence.request.request_id, self.scheduler.steps)

    def order_of(self, *requests: Request) -> str:
        for one in requests:
            self.engine.add(one)
        while self.engine.has_work:
            self.step()
        return " ".join(self.begun)


def test_the_orders() -> None:
    requests = [
        request("long", 9, priority=2, user="a"),
        request("middle", 5, priority=0, user="a"),
        request("short", 2, priority=1, user="a"),
        request("other", 7, priority=1, user="b"),
    ]
    for order, begun in {
        "shortest-first": "short middle other long",
        "priority": "middle short other long",
        "fair-share": "long other middle short",
    }.items():
        assert Bench(make_policy(f"sarathi:order={order}", 64)).order_of(*requests) == begun, order


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_an_order_and_swapping_keeps_it(policy: str) -> None:
    ordered = make_policy(f"{policy}:order=priority:aging=5", 64, swaps=True).ranking
    assert (ordered.order, ordered.aging, ordered.ranks) == ("priority", 5, True)
    assert ordered.rank(request("a", priority=-3), 0.0) == -3
    assert not make_policy(policy, 64, swaps=True).ranking.ranks
    for wrong in ("order=random", "aging=0", "order=priority:aging=-1", "aging=1.5"):
        with pytest.raises(UsageError, match=r"order|aging"):
            make_policy(f"{policy}:{wrong}", 64)


def test_the_one_behind_gives_way_when_blocks_run_out() -> None:
    bench = Bench(make_policy("sarathi:order=priority", 64), num_blocks=4, max_num_seqs=2)
    bench.engine.add(request("urgent late", 4, tokens=10, priority=0))
    bench.step()
    bench.engine.add(request("patient", 4, tokens=10, priority=5))
    bench.step()
    while not bench.scheduler.table.preemptions:
        bench.step()
    (waiting,) = bench.scheduler.waiting
    assert waiting.request.request_id == "patient"

    bench = Bench(make_policy("sarathi:order=priority", 64), num_blocks=4, max_num_seqs=2)
    bench.engine.add(request("patient", 4, tokens=10, priority=5))
    bench.step()
    bench.engine.add(request("urgent", 4, tokens=10, priority=0))
    while not bench.scheduler.table.preemptions:
        bench.step()
    (waiting,) = bench.scheduler.waiting
    assert waiting.request.request_id == "patient", "though it came first"


def test_a_priority_without_an_order_is_refused() -> None:
    with pytest.raises(
        UsageError, match="priority 3 has no effect here: start with --policy NAME:order=priority"
    ):
        Bench(make_policy("sarathi", 64)).engine.add(request("a", priority=3))


@pytest.mark.parametrize("aging", [1, 7, 40])
def test_a_prompt_waits_no_longer_than_its_aging_for_those_that_overtake_it(aging: int) -> None:
    """A shorter prompt arrives before every step; all of them take two steps."""
    bench = Bench(make_policy(f"sarathi:order=shortest-first:aging={aging}", 64))
    bench.engine.add(request("first", 2))
    bench.engine.add(request("long", 20))
    for number in range(aging + 10):
        bench.step()
        bench.engine.add(request(f"short {number}", 2))
    assert bench.begun["long"] <= aging + 2, "the one that runs may still end"


class ByLot(ChunkedPrefill):
    """Ranks that nothing explains, few enough that many are equal."""

    def __init__(self, token_budget: int, seed: int, aging: int) -> None:
        super().__init__(token_budget)
        object.__setattr__(self, "lots", random.Random(seed))
        object.__setattr__(self, "aging", aging)

    def rank(self, request: Request, fair_start: float) -> float:
        return self.lots.choice((-1.5, 0, 0, 2, fair_start))  # type: ignore[attr-defined]


class RankedAtRandom(AtRandom):
    """Decisions that nobody would make, in an order that nobody would choose."""

    @property
    def ranking(self) -> Policy:
        return ByLot(1, seed=len(self.decisions), aging=3)


def _scheduler(policy: Policy, life: dict) -> Scheduler:
    return Scheduler(
        policy,
        num_blocks=life["num_blocks"],
        block_size=life["block_size"],
        max_model_len=life["max_model_len"],
        max_num_seqs=life["max_num_seqs"],
        prefix_caching=life["prefix_caching"],
        pipeline_depth=life["depth"],
        async_scheduling=life["async_scheduling"],
    )


@settings(max_examples=60, deadline=None)
@given(life=lives(), seed=st.integers(0, 1000), aging=st.sampled_from([1, 3, 10, 1000]))
def test_under_any_order_every_request_gets_the_tokens_it_would_get_alone(
    life: dict, seed: int, aging: int
) -> None:
    scheduler = _scheduler(ByLot(life["token_budget"], seed, aging), life)
    executor = MemoryCheckingExecutor(
        life["num_blocks"],
        life["block_size"],
        depth=life["depth"],
        async_scheduling=life["async_scheduling"],
    )
    arrived: dict[int, int] = {}  # step of each sequence's arrival

    def check() -> None:
        check_integrity(scheduler)
        table = scheduler.table
        for queue in (table.waiting, table.running):
            ranks = [(one.rank, one.sequence_id) for one in queue]
            assert ranks == sorted(ranks)
        for sequence in table.sequences.values():
            arrived.setdefault(sequence.sequence_id, scheduler.steps)
        overdue = [
            one for one in table.waiting if scheduler.steps - arrived[one.sequence_id] > aging
        ]
        assert overdue == sorted(overdue, key=lambda one: one.sequence_id)
        assert overdue == list(table.waiting)[: len(overdue)], (
            "nobody may pass those who have waited long enough"
        )

    outputs, reasons = live(Engine(scheduler, executor, vocab_size=50), life["arrivals"], check)
    check_outputs(life["arrivals"], life["max_model_len"], outputs, reasons)
    assert scheduler.pool.free_blocks == life["num_blocks"]


@settings(max_examples=30, deadline=None)
@given(life=lives(), memory=TIERS, decided=DECIDED)
def test_orders_with_two_tiers_and_several_layouts(
    life: dict, memory: dict, decided: list[Decision]
) -> None:
    check_on_two_tiers(RankedAtRandom(decided), life, memory)


def test_users_share_alike_however_many_requests_each_has() -> None:
    bench = Bench(make_policy("sarathi:order=fair-share", 64), num_blocks=16)
    for number in range(40):
        bench.engine.add(request(f"greedy {number}", 8, user="greedy"))
    for number in range(10):
        bench.engine.add(request(f"modest {number}", 8, user="modest"))
    begun = bench.order_of().split(" ")[::2]
    # Tags count prompts alone until answers have ended, which these do at once and equally.
    assert begun[:20] == ["greedy", "modest"] * 10


def test_a_user_who_comes_late_does_not_wait_for_a_backlog() -> None:
    bench = Bench(make_policy("sarathi:order=fair-share", 64), num_blocks=16)
    for number in range(30):
        bench.engine.add(request(f"greedy-{number}", 8, user="greedy"))
    for _ in range(30):
        bench.step()
    bench.engine.add(request("late", 8, user="late"))
    before = len(bench.begun)
    while "late" not in bench.begun:
        bench.step()
    assert len(bench.begun) - before <= 2


def test_made_up_users_take_no_more_memory_than_there_is_for_them() -> None:
    ordering = Ordering(make_policy("sarathi:order=fair-share", 64))
    for number in range(3 * MOST_USERS):
        one = request(f"r{number}", 1 + number % 7, user=f"user {number}")
        ordering.rank(one)
        ordering.admit(one)
        ordering.end(one, 5)
        assert len(ordering._asked) <= MOST_USERS + 1
