"""The best static configuration against the best pair of layouts, found in the same three rounds
for both.

First an estimate makes a short list; then what is on it is simulated once; then the two best with
every seed.

The estimate goes event by event instead of step by step: between two events (a prompt is computed,
an answer ends) all steps are taken to be alike, the pipeline to be full and without bubbles, and
memory to be shared without preemption. That is a hundred times faster than simulating, and says
which configurations may be the best ones.
"""

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

import msgspec
from msgspec.structs import replace

from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.papers.cases import (
    BLOCK_SIZE,
    TOKEN_BUDGETS,
    Case,
    Outcome,
    Runs,
    over_seeds,
    with_budget,
)
from nanoserve.lab.papers.framework import Run, Scale
from nanoserve.lab.papers.seesaw.settings import RESHARDING, fitting_layouts
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape
from nanoserve.scheduler.work import StepWork

STATIC_KIND, RESHARDING_KIND = "static", "resharding"
BestOfBoth = Runs[tuple[Case, str]]
"""Runs by setting and kind of configuration: for each kind the best case, with every seed."""


def seconds(outcome: Outcome) -> float:
    """Time until the last answer ended."""
    return outcome.result.seconds


def compare(settings: Sequence[Case], scale: Scale, run: Run) -> BestOfBoth:
    """The best of both kinds in every setting; settings on which nothing can be re-sharded are left
    out."""
    lists = [Shortlist(setting=setting, candidates=scale.pick(3, 8)) for setting in settings]
    outcomes = run(lists)
    candidates = {
        (one.setting, kind): cases
        for one in lists
        if outcomes[one][RESHARDING_KIND]
        for kind, cases in outcomes[one].items()
    }
    outcomes = run(case for several in candidates.values() for case in several)
    best = {
        key: min(several, key=lambda case: seconds(outcomes[case]))
        for key, several in candidates.items()
    }
    return Runs(run, {key: over_seeds(case, scale.seeds) for key, case in best.items()})


def gains(runs: BestOfBoth, setting: Case) -> list[float]:
    """Throughput of re-sharding over that of the static configuration, of each seed."""
    return runs.ratios((setting, STATIC_KIND), (setting, RESHARDING_KIND), seconds)


class Shortlist(msgspec.Struct, frozen=True, kw_only=True):
    """A SimulationJob: the configurations worth simulating, the most promising first; the same
    search for everybody."""

    setting: Case  # what is to be run, on all devices of its first layout
    candidates: int  # number of candidates of each kind, static and re-sharding

    def run(self) -> dict[str, tuple[Case, ...]]:
        """Estimate every layout, and every pair of layouts of equal data parallelism, with every
        token budget.

        A batch for which nothing can be re-sharded has no pairs.
        """
        layouts = fitting_layouts(self.setting)
        static = [replace(self.setting, layouts=(layout,)) for layout in layouts]
        pairs = [
            replace(self.setting, layouts=(first, second), system=RESHARDING)
            for first in layouts
            for second in layouts
            if first != second and first.data_parallel == second.data_parallel
        ]
        return {STATIC_KIND: self._best(static), RESHARDING_KIND: self._best(pairs)}

    def _best(self, cases: Sequence[Case]) -> tuple[Case, ...]:
        return tuple(islice(_few_budgets(ranked(cases)), self.candidates))


class BestBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A SimulationJob: a case with that one of TOKEN_BUDGETS which suits it best."""

    case: Case

    def run(self) -> Case:
        return ranked([self.case])[0]


def ranked(cases: Sequence[Case]) -> list[Case]:
    """The cases of one setting with every budget, the fastest first."""
    every = [with_budget(case, budget) for case in cases for budget in TOKEN_BUDGETS]
    if not every:
        return []
    return sorted(every, key=Estimate(every[0]).seconds)


def _few_budgets(cases: Sequence[Case]) -> Iterator[Case]:
    """Each configuration with its best budget and half of that.

    The estimate knows no preemption, and of two chunks the larger one fills memory sooner with
    prompts.
    """
    named: set[str] = set()
    for case in cases:
        if case.layout_name not in named:
            named.add(case.layout_name)
            yield case
            if case.system.token_budget > min(TOKEN_BUDGETS):
                yield with_budget(case, case.system.token_budget // 2)


class Estimate:
    """Estimates the time for the requests of a setting; parts that configurations have in common
    are computed once."""

    def __init__(self, setting: Case) -> None:
        self._setting, self._shapes = setting, list(setting.shapes())
        self._decoding: dict[ParallelLayout, list[float]] = {}

    def seconds(self, case: Case) -> float:
        """Estimated time until the slowest replica is done."""
        first, *others = case.layouts
        budget = case.system.token_budget
        costs, replicas = self._setting.costs(first), first.data_parallel
        shares = [self._shapes[number::replicas] for number in range(replicas)]
        if not others:
            return max(_Batch(costs, share).chunked_seconds(budget) for share in shares)
        prompts = [_prefill_seconds(costs, share, budget) for share in shares]
        return max(map(sum, zip(prompts, self._decode_seconds(others[0]), strict=True)))

    def _decode_seconds(self, layout: ParallelLayout) -> list[float]:
        """Seconds of each replica for changing to this layout and for all answers."""
        if layout not in self._decoding:
            costs = self._setting.costs(layout)
            reload = max(map(costs.reload_seconds, range(costs.num_stages)))
            shares = [
                self._shapes[first :: layout.data_parallel] for first in range(layout.data_parallel)
            ]
            self._decoding[layout] = [
                reload + _Batch(costs, share).decode_seconds() for share in shares
            ]
        return self._decoding[layout]


def _prefill_seconds(costs: StepCosts, shapes: Sequence[RequestShape], token_budget: int) -> float:
    """All prompts and nothing else, in chunks of the whole budget, each from the middle of a
    prompt."""
    tokens = sum(shape.input_tokens for shape in shapes)
    start = max(0, (tokens // len(shapes) - token_budget) // 2)
    return (
        tokens / token_budget * _slowest(costs, costs.work([], [(start, token_budget)], sampled=1))
    )


def _slowest(costs: StepCosts, work: StepWork) -> float:
    """Seconds between two micro-batches of a full pipeline: of the first stage, which has the
    embedding and layers left over, or the last, which has the head.
    """
    return max(costs.stage_seconds(work, stage) for stage in {0, costs.num_stages - 1})


class _Batch:
    """A replica's requests on their way, oldest first.

    An answer gains a token in every round, in which each micro-batch of the pipeline has its turn;
    so all that must be kept of one is the round in which it ends.
    """

    def __init__(self, costs: StepCosts, shapes: Sequence[RequestShape]) -> None:
        self._costs, self._stages = costs, costs.num_stages
        self._waiting = list(reversed(shapes))
        self._ends: list[tuple[float, int]] = []  # round, and tokens held on average
        self._free = costs.memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE
        self._held = 0
        self._round = 0.0

    def decode_seconds(self) -> float:
        """All answers, whose prompts lie in host memory."""
        seconds = 0.0
        while self._waiting or self._ends:
            while self._waiting and self._admits(self._waiting[-1]):
                self._begin(self._waiting.pop())
            rounds = self._ends[0][0] - self._round
            seconds += rounds * self._round_seconds()
            self._advance(rounds)
        return seconds

    def chunked_seconds(self, token_budget: int) -> float:
        """Prompts and answers in one step: all answers, and as much of a prompt as the budget
        leaves."""
        seconds = tokens = 0.0
        while self._waiting or self._ends:
            if not tokens and self._waiting and self._admits(self._waiting[-1]):
                tokens = float(self._waiting[-1].input_tokens)
            chunk = token_budget - self._rows
            if not tokens or chunk <= 0:
                rounds = self._ends[0][0] - self._round
                seconds += rounds * self._round_seconds()
            else:
                steps = tokens / chunk
                if self._ends:
                    steps = min(steps, (self._ends[0][0] - self._round) * self._stages)
                seconds += steps * self._pace(self._rows, chunk, self._waiting[-1].input_tokens)
                rounds = steps / self._stages
                tokens -= steps * chunk
                if tokens < 1:
                    tokens = 0.0
                    self._begin(self._waiting.pop())
            self._advance(rounds)
        return seconds

    @property
    def _rows(self) -> int:
        """Answers of one micro-batch: b / PP in Appendix A."""
        return math.ceil(len(self._ends) / self._stages)

    @property
    def _context(self) -> int:
        """Keys of an answer, on average."""
        return max(1, self._held // max(1, len(self._ends)))

    def _admits(self, shape: RequestShape) -> bool:
        return (
            not self._ends
            or self._held + shape.input_tokens + shape.output_tokens // 2 <= self._free
        )

    def _begin(self, shape: RequestShape) -> None:
        held = shape.input_tokens + shape.output_tokens // 2
        self._held += held
        heappush(self._ends, (self._round + shape.output_tokens, held))

    def _advance(self, rounds: float) -> None:
        self._round += rounds
        while self._ends and self._ends[0][0] <= self._round + 1e-6:
            self._held -= heappop(self._ends)[1]

    def _round_seconds(self) -> float:
        """Each micro-batch once; and if there are fewer than stages, the way of one of them through
        all stages."""
        return self._stages * _slowest(self._costs, self._costs.work([self._context] * self._rows))

    def _pace(self, rows: int, chunk: int, prompt: int) -> float:
        start = max(0, (prompt - chunk) // 2)
        return _slowest(
            self._costs,
            self._costs.work([self._context] * rows, [(start, chunk)], sampled=rows + 1),
        )
