"""Requests of every kind, what each of them answers alone in one process, and random lives of an
engine with them."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.start.model_loading import with_cache_groups
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.lab.benchmarks.policies.variants import DecodePrioritizing, PrefillPrioritizing
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.request import (
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    SequenceUpdate,
    TokenLogprob,
)
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.optional import LayoutPlan
from nanoserve.scheduler.plan import Executor, StepPlan
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.text.grammar.compiler import GrammarCompiler
from tests.executor.small_model import local_executor
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.lives import Arrival, live

BLOCK_SIZE = 4
MAX_MODEL_LEN = 80
KV_BYTES = 8 << 20
TIGHT_BLOCKS, ROOMY_BLOCKS = 21, 200
RESHARDING: dict[str, Callable[[int], Policy]] = {
    "minimizing": TransitionMinimizing,
    "prefill-prioritizing": PrefillPrioritizing,
    "decode-prioritizing": DecodePrioritizing,
}
SCHEMA = '{"type":"object","properties":{"age":{"type":"integer"},"name":{"type":"string"}},"required":["age","name"]}'


def requests(vocab_size: int, *, schemas: bool) -> list[Request]:
    """Long and short prompts with and without a common beginning, greedy and sampled, with
    everything that rows carry.

    Args:
        schemas: whether the model has a tokenizer for them.
    """
    tokens = random.Random(5).choices(range(3, vocab_size), k=200)
    shared, ends = tokens[:37], tuple(range(vocab_size // 10))  # every tenth token ends an answer
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    kinds: list[tuple[list[int], SamplingParams, dict[str, Any]]] = [
        (shared, greedy, {}),
        (shared + tokens[50:60], greedy, {}),
        (
            shared,
            SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
            {"cache_salt": "tenant"},
        ),
        (tokens[70:73], SamplingParams(temperature=0.0, max_tokens=20), {"end_tokens": ends}),
        (tokens[80:81], SamplingParams(temperature=0.0, max_tokens=16, frequency_penalty=2.0), {}),
        (shared[:30], SamplingParams(temperature=0.9, top_p=0.8, n=2, max_tokens=14), {}),
        (
            tokens[90:108],
            SamplingParams(
                temperature=1.5, top_k=9, repetition_penalty=1.3, n=3, max_tokens=10, logprobs=3
            ),
            {},
        ),
        (
            shared + tokens[110:114],
            SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2),
            {},
        ),
        (
            shared[:18],
            SamplingParams(
                min_p=0.01,
                presence_penalty=1.0,
                logit_bias={7: 2.0, 9: -100.0},
                min_tokens=4,
                max_tokens=16,
            ),
            {"end_tokens": ends},
        ),
    ]
    if schemas:
        kinds.append((tokens[120:131], SamplingParams(json_schema=SCHEMA, n=2, max_tokens=16), {}))
    return [
        Request(f"r{number}", tuple(prompt), params, seed=40 + number, **settings)
        for number, (prompt, params, settings) in enumerate(kinds)
    ]


@dataclass(frozen=True)
class Case:
    """One way to schedule: a policy, perhaps with ablations behind its name, and what it has to do
    with."""

    policy: str
    token_budget: int = 64
    num_blocks: int = ROOMY_BLOCKS
    max_num_seqs: int = 256
    prefix_caching: bool = True
    depth: int | None = None
    seed: int = 0
    host_blocks: int = 0


def pairwise(**factors: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Combinations in which each value of each factor meets each of every other, and not many more
    than needed."""
    names = list(factors)
    whole = [dict(zip(names, values, strict=True)) for values in product(*factors.values())]

    def pairs(chosen: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {
            (a, chosen[a], b, chosen[b])
            for place, a in enumerate(names)
            for b in names[place + 1 :]
        }

    missing = set[tuple[str, Any, str, Any]]().union(*map(pairs, whole))
    while missing:
        best = max(whole, key=lambda chosen: len(pairs(chosen) & missing))
        missing -= pairs(best)
        yield best


@dataclass
class Seen:
    """Counts of events in the lives of a test: it proves little if nothing of this has."""

    preemptions: int = 0
    cached_tokens: int = 0
    copies: int = 0
    aborted: int = 0
    swaps: int = 0
    transitions: int = 0
    chunks: int = 0
    host_tokens: int = 0
    taken: int = 0
    together: int = 0
    sequences: dict[tuple[str, int], Sequence] = field(default_factory=dict)


class WatchedScheduler(Scheduler):
    """Takes notes of its plans."""

    def __init__(self, *arguments: Any, seen: Seen, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._seen = seen

    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is not None:
            self._seen.copies += len(plan.copies)
            self._seen.swaps += len(plan.host.swaps)
            self._seen.chunks += sum(not row.sample for row in plan.rows)
            on_host = [row for row in plan.rows if row.host is not None]
            self._seen.host_tokens += sum(len(row.tokens) for row in on_host)
            self._seen.taken += sum(not row.tokens for row in on_host)
            self._seen.together = max(self._seen.together, self.steps_in_flight)
        return plan


class WatchedEngine(Engine):
    """Takes notes of its updates."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, vocab_size: int, seen: Seen
    ) -> None:
        super().__init__(scheduler, executor, vocab_size=vocab_size)
        self._seen = seen

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        return self._note(super().step(until))

    def stop(self, request_id: str, **settings: Any) -> list[SequenceUpdate]:
        return self._note(super().stop(request_id, **settings))

    def _note(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        for update in updates:
            assert update.sequence.error is None, update.sequence.error
            self._seen.sequences[update.request_id, update.index] = update.sequence
        return updates


@dataclass(frozen=True)
class Expected:
    """Answer of a sample that has the engine to itself."""

    tokens: list[int]
    reason: FinishReason | None
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]

    @classmethod
    def of(cls, sequence: Sequence) -> "Expected":
        return cls(
            sequence.output_tokens,
            sequence.finish_reason,
            sequence.logprobs,
            sequence.prompt_logprobs,
        )

    def check(self, sequence: Sequence, what: object) -> None:
        """A sequence has answered the same, or as much of it as there was before somebody gave up
        on it."""
        count = len(sequence.output_tokens)
        if sequence.finish_reason is not FinishReason.ABORT:
            assert (count, sequence.finish_reason) == (len(self.tokens), self.reason), what
            _compare_logprobs(sequence.prompt_logprobs, self.prompt_logprobs)
        assert sequence.output_tokens == self.tokens[:count], what
        _compare_logprobs(sequence.logprobs, self.logprobs[:count])


class Reference:
    """A model in this process, which answers one request at a time, in steps of whole prompts.

    Attributes:
        expected: by request and sample.
        quantization: how weights are rounded while they load, here and by workers.
    """

    def __init__(
        self, resolved: ResolvedModel, *, schemas: bool = True, quantization: str | None = None
    ) -> None:
        assert resolved.directory is not None
        self.quantization = quantization
        decoder, config = load_model(resolved.directory, "float32", quantization=quantization)
        self.resolved, self.model, self.vocab_size = resolved, config, config.vocab_size
        self.requests = requests(config.vocab_size, schemas=schemas)
        executor = local_executor(
            decoder,
            num_blocks=ROOMY_BLOCKS * len(config.cache_groups.windows),
            block_size=BLOCK_SIZE,
            grammars=GrammarCompiler(resolved.tokenizer_directory, config.vocab_size),
        )
        case = Case("sarathi", token_budget=2048, prefix_caching=False)
        self.expected: dict[tuple[str, int], Expected] = {}
        for request in self.requests:
            seen = _run(executor, case, [[Arrival(0, request, None, None)]], self.vocab_size)
            self.expected |= {
                key: Expected.of(sequence) for key, sequence in seen.sequences.items()
            }
        executor.close()
        self._check_margins()

    def _check_margins(self) -> None:
        """No greedy choice is so close that rounding could decide it: sums are not added up in the
        same order."""
        greedy = [
            one.request_id
            for one in self.requests
            if one.params.temperature == 0 and one.params.logprobs
        ]
        chosen = [logprob for name in greedy for logprob in self.expected[name, 0].logprobs]
        assert min(one.top[0][1] - one.top[1][1] for one in chosen) > 1e-4

    def engine(self, workers: WorkersExecutor, case: Case) -> Engine:
        """One for the same model; not to be closed, since the workers would be."""
        return _engine(workers, case, self.vocab_size, Seen())

    def check(self, workers: WorkersExecutor, cases: list[Case]) -> Seen:
        """Live each case on these workers: every request answers what it does alone. Returns what
        was seen."""
        total = Seen()
        for case in cases:
            arrivals = _arrivals(self.requests, case.seed)
            seen = _run(workers, case, self._parts(workers, arrivals), self.vocab_size)
            for arrival, index in (
                (one, index) for one in arrivals for index in range(one.request.params.n)
            ):
                key = (arrival.request.request_id, index)
                self.expected[key].check(seen.sequences[key], (case, key))
                total.aborted += seen.sequences[key].finish_reason is FinishReason.ABORT
                total.cached_tokens += seen.sequences[key].cached_tokens
            total.preemptions += seen.preemptions
            total.copies += seen.copies
            total.swaps += seen.swaps
            total.transitions += seen.transitions
            total.chunks += seen.chunks
            total.host_tokens += seen.host_tokens
            total.taken += seen.taken
            total.together = max(total.together, seen.together)
        return total

    def _parts(self, workers: WorkersExecutor, arrivals: list[Arrival]) -> list[list[Arrival]]:
        """Requests that come when all before are done. Between two layouts the last two come alone, so
        that each layout follows the other twice; with the others, how often that happens depends on
        how soon steps come back."""
        if len(workers.capacities) == 1:
            return [arrivals]
        stay = [
            one for one in arrivals if one.abort_step is None and len(self._tokens(one.request)) > 1
        ]
        others = [one for one in arrivals if one not in stay[-2:]]
        return [others, *([replace(one, step=0)] for one in stay[-2:])]

    def _tokens(self, request: Request) -> list[int]:
        """Tokens of the first sample."""
        return self.expected[request.request_id, 0].tokens


def _compare_logprobs(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.token == other.token
        # of tokens that are equally likely but for rounding, either is first
        assert abs(one.rank - other.rank) <= 1
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [likely for likely, _ in one.top] == [likely for likely, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in other.top], abs=1e-4
        )


def _arrivals(zoo: list[Request], seed: int) -> list[Arrival]:
    """All requests in any order, some soon after each other; some are given up on, or one of their
    samples is."""
    choice = random.Random(seed)
    arrivals = []
    for request in choice.sample(zoo, len(zoo)):
        step = choice.choice((0, 0, 2, 5, 9))
        abort = step + choice.randrange(1, 20) if choice.random() < 0.3 else None
        index = choice.choice((None, 0, 1)) if request.params.n > 1 else None
        arrivals.append(Arrival(step, request, abort, index))
    return arrivals


def _engine(executor: Executor, case: Case, vocab_size: int, seen: Seen) -> Engine:
    """An engine with a scheduler of its own; the executor may have had others before."""
    if isinstance(executor, WorkersExecutor):
        capacities, windows = executor.capacities, executor.windows
    else:
        assert isinstance(executor, LocalExecutor)
        capacities, windows = (), executor.runner.config.cache_groups.windows
    scheduler = WatchedScheduler(
        _policy(case),
        num_blocks=case.num_blocks * len(windows),
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=case.max_num_seqs,
        prefix_caching=case.prefix_caching,
        pipeline_depth=case.depth
        or (capacities[0].pipeline_depth if capacities else executor.max_in_flight),
        extensions=make_extensions(
            host_blocks=case.host_blocks * len(windows),
            other_layouts=[
                replace(capacity, num_blocks=case.num_blocks * len(windows))
                for capacity in capacities[1:]
            ],
        ),
        predictors=[LinearPredictor()] * len(capacities) if case.host_blocks else (),
        windows=windows,
        seen=seen,
    )
    return WatchedEngine(scheduler, executor, vocab_size=vocab_size, seen=seen)


def _policy(case: Case) -> Policy:
    name, *ablations = case.policy.split()
    if name in RESHARDING:
        return RESHARDING[name](case.token_budget)
    return make_policy(
        name, case.token_budget, dict.fromkeys(ablations, True), swaps=case.host_blocks > 0
    )


def _run(executor: Executor, case: Case, parts: list[list[Arrival]], vocab_size: int) -> Seen:
    """An engine's life from its first request to its last; the executor lives on."""
    seen = Seen()
    engine = _engine(executor, case, vocab_size, seen)
    if isinstance(executor, WorkersExecutor) and executor.layout != engine.status.layouts[0]:
        executor.submit(
            StepPlan(-1, layouts=LayoutPlan(transition=engine.status.layouts[0]))
        )  # where the engine before has left it
        while not executor.collect(None):
            pass
    for arrivals in parts:
        live(engine, arrivals)
    seen.preemptions, seen.transitions = engine.status.preemptions, engine.status.transitions
    return seen


def start_workers(
    reference: Reference,
    *,
    metadata: Literal["decoupled", "coupled"] = "decoupled",
    host_blocks: int = 0,
    eager: bool = True,
    **settings: Any,
) -> WorkersExecutor:
    """Workers that run the reference's model, with room for every case."""
    config = EngineConfig(
        dtype="float32",
        eager=eager,
        block_size=BLOCK_SIZE,
        kv_cache_memory=KV_BYTES,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        quantization=reference.quantization,
        **settings,
    )
    model = with_cache_groups(reference.model, config)
    workers = WorkersExecutor(
        reference.resolved,
        config,
        model=model,
        host_blocks=host_blocks * len(model.cache_groups.windows),
        metadata=metadata,
        observe_times=host_blocks > 0,
    )
    assert workers.capacities[0].num_blocks >= ROOMY_BLOCKS * len(workers.windows)
    return workers
