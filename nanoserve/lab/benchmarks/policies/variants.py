"""Variants to compare: policies on open engines, the cases of KV memory, and how requests run. No
torch."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple, cast

import msgspec

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.simulator.pipeline import MovingTimes, TieredTimes
from nanoserve.lab.simulator.replay import record_run
from nanoserve.lab.workloads import random_prompts
from nanoserve.layout import ParallelLayout
from nanoserve.record.events import Worked
from nanoserve.record.recorder import recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, RequestShape, SamplingParams
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Load, Policy
from nanoserve.scheduler.optional import LayoutCapacity, LayoutPlan
from nanoserve.scheduler.plan import Executor, StepPlan
from nanoserve.scheduler.policies import make_policy
from nanoserve.scheduler.policies.transition_minimizing import (
    TransitionMinimizing,
    device_fits_pool,
)
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.windows import most_tokens

_PATIENCE, _LOOK = 5.0, 0.01
"""Seconds within which workers report what they did for the last plan (they need milliseconds), and
between looks."""
_EXECUTOR = ("max_in_flight", "async_scheduling", "ready", "collect", "now", "close", "take_times")


@dataclass(frozen=True, slots=True)
class DecodePrioritizing(TransitionMinimizing):
    """Seesaw's figure 2 (b): as many prompts as the device holds, and the next ones when the last
    answer has ended. Transitions are few, and batches shrink."""

    def _pool_room(self, load: Load) -> int:
        """Blocks left for further prompts once the device holds all parked sequences, each with a
        block to grow."""
        held = load.host.total_blocks - load.host.free_blocks + load.host.decodes + load.host.moving
        return min(load.host.free_blocks, load.total_blocks - held)

    def _turns_back(self, load: Load) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PrefillPrioritizing(DecodePrioritizing):
    """Seesaw's figure 2 (a): the same room, but re-sharding as soon as a prompt fits the device;
    decodes pass through the pool twice. Batches are full, and every few answers that end cost a
    transition."""

    def _turns_back(self, load: Load) -> bool:
        return (
            load.first_waiting_blocks + load.running_decodes <= load.free_blocks
            and device_fits_pool(load)
        )


RESHARDING: dict[str, type[TransitionMinimizing]] = {
    "prefill-prioritizing": PrefillPrioritizing,
    "decode-prioritizing": DecodePrioritizing,
    "transition-minimizing": TransitionMinimizing,
}
"""Ways of changing between two layouts (Seesaw, figures 2 and 6); the first two have no tiered
buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngine:
    """An engine that is ready; it is started once for all runs."""

    name: str
    executor: Executor
    vocab_size: int
    layouts: tuple[ParallelLayout, ...] = (ParallelLayout(),)
    capacities: tuple[LayoutCapacity, ...]  # one entry per layout
    # uncorrected, one per layout; empty where the policies need none
    predictors: tuple[Predictor, ...] = ()
    windows: tuple[int, ...] = (0,)  # of the model's cache groups
    state_slots: int = 0  # for recurrent states
    workers: int = 0  # processes that compute and report their times; 0 if this process computes
    host_blocks: int = 0  # KV blocks in host memory
    # of one worker to or from host memory, bytes per second; None: unknown
    host_link_bandwidth: float | None = None
    host_threads: int = 0  # CPU threads that compute attention in host memory
    compiled: bool  # whether its layers run compiled
    # one per layout, measured before it was opened; empty if nothing is predicted
    costs: tuple[MovingTimes, ...] = ()
    simulated: bool = True  # whether the simulator has a model of it
    measure_times: Callable[[], TieredTimes] | None = None
    """Measures what things take now, for the simulator; None if the simulator takes the times of
    each run's record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVariant:
    policy: str  # name, perhaps with parameters
    place: str = ""  # name of the engine or the layouts; empty if all variants share them
    engine: OpenEngine
    config: EngineConfig
    """Settings that all schedulers share, with a longest sequence. Prompts are random, so no
    prefixes are cached."""
    # of the layouts that the scheduler knows, the engine's from ``first`` on
    capacities: Sequence[LayoutCapacity]
    first: int = 0  # the engine's number of the layout in which runs begin
    host_blocks: int = 0
    # of the real scheduler; the simulator's learns from what these know
    predictors: Sequence[Predictor] = ()

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.policy, self.place)))

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Layouts by the scheduler's numbers: one, or those of prompts and of decodes."""
        return self.engine.layouts[self.first : self.first + len(self.capacities)]

    def scheduler(self, *, simulated: bool = False) -> Scheduler:
        """A new scheduler, for the engine or for the simulator."""
        config = self.config
        assert config.max_model_len is not None, "known since the engines are open"
        budget, first, predictors = (
            config.max_num_batched_tokens,
            self.capacities[0],
            self.predictors,
        )
        if self.policy in RESHARDING:
            policy: Policy = RESHARDING[self.policy](budget)
        else:
            policy = make_policy(self.policy, budget)
        if simulated:
            predictors = deepcopy(predictors)
        return Scheduler(
            policy,
            num_blocks=first.num_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            prefix_caching=False,
            pipeline_depth=first.pipeline_depth,
            extensions=make_extensions(
                host_blocks=self.host_blocks,
                other_layouts=self.capacities[1:],
                state_slots=self.engine.state_slots,
            ),
            predictors=predictors,
            async_scheduling=not simulated and self.engine.executor.async_scheduling,
            windows=self.engine.windows,
        )

    def run(self, requests: Sequence[Request]) -> RunRecord:
        """Run requests to their ends, beginning in the first layout. Raises as `run_requests`."""
        engine, vocab_size = self.engine, self.engine.vocab_size
        executor = enter_layout(engine.executor, self.first)
        return run_requests(
            executor, self.scheduler, requests, vocab_size=vocab_size, workers=engine.workers
        )


def fitted(config: EngineConfig, model: ModelConfig, engines: Sequence[OpenEngine]) -> EngineConfig:
    """The settings with the longest sequence that all of these engines hold."""
    blocks = [capacity.num_blocks for engine in engines for capacity in engine.capacities]
    blocks += [engine.host_blocks for engine in engines if len(engine.layouts) > 1]
    longest = config.max_model_len or model.max_position_embeddings
    return replace(
        config,
        max_model_len=most_tokens(engines[0].windows, min(blocks), config.block_size, longest),
    )


def make_requests(
    shapes: Sequence[RequestShape], arrivals: Sequence[float], vocab_size: int, seed: int
) -> list[Request]:
    """Random prompts with greedy answers of exactly the wanted lengths; equal for equal seeds.
    ``arrivals`` are seconds from the beginning of the run, ascending."""
    prompts = random_prompts([shape.input_tokens for shape in shapes], vocab_size, seed)
    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=shape.output_tokens)
        for shape in shapes
    ]
    return [
        Request(f"request-{number}", prompt, wanted, seed=0, arrival_time=arrival)
        for number, (prompt, wanted, arrival) in enumerate(
            zip(prompts, params, arrivals, strict=True)
        )
    ]


def run_requests(
    executor: Executor,
    make_scheduler: Callable[[], Scheduler],
    requests: Sequence[Request],
    *,
    vocab_size: int,
    workers: int = 0,
) -> RunRecord:
    """Run requests to their ends under a new scheduler; the record has the times that the
    ``workers`` report. Arrival times are from the beginning of the run on, in order. Raises
    UsageError if a request can never run, and RuntimeFailure if one fails, workers die, attention
    on the CPU is lost, or a worker does not report its times."""
    began = executor.now()
    moved = [replace(request, arrival_time=began + request.arrival_time) for request in requests]
    engine = Engine(make_scheduler(), executor, vocab_size=vocab_size)
    record = record_run(engine, moved)
    record.check()
    wanted, until = (
        workers * sum(bool(plan.rows) for plan in record.plans),
        executor.now() + _PATIENCE,
    )
    # Reports of the last plans may come behind the results.
    while sum(len(event.stages) for event in record.of(Worked)) < wanted:
        if executor.now() > until:
            raise RuntimeFailure("the workers did not report what they did for every plan")
        recorder_of(engine).on_results(executor.collect(executor.now() + _LOOK))
    return record


def enter_layout(executor: Executor, layout: int) -> Executor:
    """Have idle workers in that layout, whatever layout the run before has left them in. Returns an
    executor whose plans run there: the scheduler knows no other layout. Raises RuntimeFailure if
    one dies."""
    current: int = getattr(executor, "layout", 0)  # only workers may have several
    if current != layout:
        executor.submit(StepPlan(0, layouts=LayoutPlan(current=current, transition=layout)))
        while not (results := executor.collect(None)):
            pass
        if results[0].lost is not None:
            raise RuntimeFailure(
                f"the workers died when they changed their layout: {results[0].lost}"
            )
    if layout == 0:
        return executor

    def submit(plan: StepPlan) -> None:
        executor.submit(
            msgspec.structs.replace(
                plan, layouts=msgspec.structs.replace(plan.layouts, current=layout)
            )
        )

    same = {name: getattr(executor, name) for name in _EXECUTOR if hasattr(executor, name)}
    return cast(Executor, SimpleNamespace(**same, submit=submit))


class KvCase(NamedTuple):
    """Equal requests, the KV blocks that the device has for them, and their share of those that
    hold everything."""

    shape: RequestShape
    share: float
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCases:
    """The grid of cases: every length of answers with every share of the KV memory."""

    input_tokens: int
    outputs: Sequence[int]  # the lengths of the answers, ascending
    requests: int  # number of requests in each case, which arrive all at once
    shares: Sequence[float]  # shares of the blocks that would hold everything, ascending
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.requests} requests of {self.input_tokens}+{','.join(map(str, self.outputs))}"

    @property
    def longest(self) -> RequestShape:
        return RequestShape(self.input_tokens, max(self.outputs))

    def sequence_blocks(self, shape: RequestShape) -> int:
        return -(-shape.total_tokens // self.block_size)

    def host_blocks(self, shape: RequestShape) -> int:
        """Blocks of host memory that hold every sequence to its end."""
        return self.requests * self.sequence_blocks(shape)

    def device_blocks(self, shape: RequestShape) -> int:
        """Blocks with which no KV has to leave the device: they hold every sequence to its end.
        Policies keep more free than is ever filled: a block for each sequence to grow into, and
        room for a prompt on its way to host memory."""
        return self.host_blocks(shape) + self.requests - (-self.input_tokens // self.block_size)

    def cases(self) -> Iterator[KvCase]:
        """Yield the cases by output length, then by share. Raises UsageError for a share that holds
        no request."""
        for output in self.outputs:
            shape = RequestShape(self.input_tokens, output)
            everything, needed = self.device_blocks(shape), self.sequence_blocks(shape)
            for share in self.shares:
                blocks = int(share * everything)
                if blocks < needed:
                    raise UsageError(
                        f"--kv-limits {share:g}: {blocks} of {everything} KV blocks do not hold "
                        "one request of "
                        f"{shape.input_tokens}+{shape.output_tokens}; give at least "
                        f"{needed / everything:.3f}"
                    )
                yield KvCase(shape, share, blocks)
