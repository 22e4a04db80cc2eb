"""Random lives of an engine part of whose decode attention is the CPU's, on tiny pools, with real
small models."""

import os
import random
from collections import Counter
from collections.abc import Sequence as SequenceOf
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.local import LocalExecutor
from nanoserve.request import FinishReason
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.work import Strategy
from tests.executor.cpu_attention.families import BLOCK_SIZE, MAX_MODEL_LEN, Model
from tests.executor.small_model import local_executor
from tests.executor.workers.loads import Seen, WatchedEngine, WatchedScheduler
from tests.fakes.integrity import host_pool
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.lives import Arrival, live

ALL_CORES = tuple(sorted(os.sched_getaffinity(0)))
"""Tests run beside others: nobody is kept to cores of his own."""
TIGHT_BLOCKS = 18
"""On the device: not much more than the longest request fills."""


class ByLot(Policy):
    """Decides by drawing lots, so that every way through the steps is taken, also those no clever
    policy takes."""

    def __init__(self, seed: int, token_budget: int) -> None:
        self._lots = random.Random(seed)
        self._token_budget = token_budget

    def decide(self, load: Load) -> Decision:
        lots = self._lots
        return Decision(
            prefill_tokens=lots.choice((0, self._token_budget, self._token_budget)),
            decodes=lots.choice((load.ready_decodes, load.ready_decodes, 1, 0)),
            host=HostDecision(
                strategy=lots.choice(("overlap", "overlap", "asymmetric", "device")),
                decodes=(lots.randint(0, load.host.decodes), lots.randint(0, load.host.decodes)),
                swap_out=lots.choice((0, 0, 0, 1, 2)),
                swap_in=lots.choice((0, 0, 0, 1, 2)),
                park=lots.random() < 0.5,
                preempt=lots.random() < 0.5,
            ),
        )


@dataclass(frozen=True)
class AllOnTheHost(Policy):
    """The device only computes prompts; as soon as they are, they move."""

    strategy: Strategy
    token_budget: int

    def decide(self, load: Load) -> Decision:
        everybody = (load.host.decodes + 1) // 2
        sizes = (load.host.ready, 0) if self.strategy == "overlap" else (everybody, everybody)
        return Decision(
            self.token_budget,
            0,
            host=HostDecision(strategy=self.strategy, decodes=sizes, park=True),
        )


STRATEGIES = ("neo", "overlap", "apex", "hybrid", "by lot")
ALL_ON_THE_HOST: dict[str, Strategy] = {
    "all on the host, overlap": "overlap",
    "all on the host, asymmetric": "asymmetric",
}


def policy_named(name: str, token_budget: int, seed: int) -> Policy:
    """One of STRATEGIES or ALL_ON_THE_HOST, which does not wait for more host sequences than there
    are in a test."""
    if name == "by lot":
        return ByLot(seed, token_budget)
    if name in ALL_ON_THE_HOST:
        return AllOnTheHost(ALL_ON_THE_HOST[name], token_budget)
    parameters: dict[str, dict[str, Any]] = {
        "apex": {"minimum_ratio": 0.0},
        "overlap": {"cohorts": 2},
    }
    return make_policy(name, token_budget, parameters.get(name))


@dataclass(frozen=True)
class Case:
    """One way to schedule; `strategy` is a name that `policy_named` knows."""

    strategy: str
    token_budget: int = 24
    num_blocks: int = TIGHT_BLOCKS
    host_blocks: int = 60
    max_num_seqs: int = 256
    prefix_caching: bool = True
    seed: int = 0


@dataclass
class HybridSeen(Seen):
    """Counts of events in a life.

    Attributes:
        host_rows: tokens begun on the host, and tokens under way there that a step was to finish,
            by strategy.
        beside_device: steps by strategy in which both tiers had rows.
        moves: swaps by direction.
    """

    host_rows: Counter[str] = field(default_factory=Counter)
    beside_device: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "HybridSeen") -> "HybridSeen":
        """Sums of two lives; their sequences are left out."""
        return HybridSeen(
            preemptions=self.preemptions + other.preemptions,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            copies=self.copies + other.copies,
            aborted=self.aborted + other.aborted,
            chunks=self.chunks + other.chunks,
            host_rows=self.host_rows + other.host_rows,
            beside_device=self.beside_device + other.beside_device,
            moves=self.moves + other.moves,
        )


class _HybridScheduler(WatchedScheduler):
    """Takes notes also of what its plans say of the host."""

    def __init__(self, policy: Policy, *, seen: HybridSeen, **settings: Any) -> None:
        super().__init__(policy, seen=seen, **settings)
        self._hybrid_seen = seen

    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is not None:
            seen, on_host = self._hybrid_seen, [row for row in plan.rows if row.host is not None]
            seen.moves.update(swap.direction for swap in plan.host.swaps)
            begun = sum(bool(row.tokens) for row in on_host)
            seen.host_rows.update(
                {
                    plan.host.strategy: begun,
                    "finished by " + plan.host.strategy: len(on_host) - begun,
                }
            )
            if 0 < len(on_host) < len(plan.rows):
                seen.beside_device[plan.host.strategy] += 1
        return plan


def hybrid_executor(model: Model, *, num_blocks: int, host_blocks: int) -> LocalExecutor:
    """On the CPU as the device, with a thread that attends in host memory."""
    pool = HostPool.of_one_process(
        model.config, num_blocks=host_blocks, block_size=BLOCK_SIZE, dtype=model.decoder.dtype
    )
    return local_executor(
        model.decoder,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        grammars=model.grammars,
        host_pool=pool,
        processor=HostProcessor(1, cores=ALL_CORES, device_cores=ALL_CORES, device_threads=1),
    )


def hybrid_engine(model: Model, case: Case, seen: HybridSeen) -> WatchedEngine:
    """The CPU is said to attend as fast as it takes for host sequences to take part."""
    scheduler = _HybridScheduler(
        policy_named(case.strategy, case.token_budget, case.seed),
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=case.max_num_seqs,
        prefix_caching=case.prefix_caching,
        extensions=make_extensions(host_blocks=case.host_blocks),
        predictors=[LinearPredictor(num_layers=model.config.num_layers, host_key=1e-4, row=0.01)],
        seen=seen,
    )
    executor = hybrid_executor(model, num_blocks=case.num_blocks, host_blocks=case.host_blocks)
    return WatchedEngine(scheduler, executor, vocab_size=model.config.vocab_size, seen=seen)


def live_through(model: Model, case: Case, arrivals: SequenceOf[Arrival]) -> HybridSeen:
    """All requests to their end; all blocks come back."""
    seen = HybridSeen()
    with closing(hybrid_engine(model, case, seen)) as engine:
        live(engine, list(arrivals))
        assert engine.scheduler.pool.free_blocks == case.num_blocks
        assert host_pool(engine.scheduler).free_blocks == case.host_blocks
        seen.preemptions = engine.scheduler.table.preemptions
    return seen


def check(model: Model, case: Case, arrivals: SequenceOf[Arrival]) -> HybridSeen:
    """Every request answers what it does alone on a device with room for all of its KV."""
    seen = live_through(model, case, arrivals)
    for arrival in arrivals:
        for index in range(arrival.request.params.n):
            key = (arrival.request.request_id, index)
            sequence = seen.sequences[key]
            model.expected[key].check(sequence, (model.config.family, case, key))
            seen.aborted += sequence.finish_reason is FinishReason.ABORT
            seen.cached_tokens += sequence.cached_tokens
    return seen


def at_random(model: Model, seed: int) -> list[Arrival]:
    """All requests in any order, some soon after each other; some are given up on, or one of their
    samples is."""
    lots, arrivals = random.Random(seed), []
    for request in lots.sample(model.requests, len(model.requests)):
        step = lots.choice((0, 0, 2, 5, 9))
        abort = step + lots.randrange(1, 20) if lots.random() < 0.2 else None
        index = lots.choice((None, 0, 1)) if request.params.n > 1 else None
        arrivals.append(Arrival(step, request, abort, index))
    return arrivals
