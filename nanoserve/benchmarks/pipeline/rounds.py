"""Policies and engines in interleaved rounds: what each made of the same requests, and their ratios. No torch."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from nanoserve.benchmarks.floors import Limits, ModelCost, StepShape
from nanoserve.benchmarks.pipeline.running import run_requests
from nanoserve.benchmarks.pipeline.simulated import Comparison, compare_with_simulator
from nanoserve.benchmarks.variants import VariantsBench, VariantsRound
from nanoserve.layout import ParallelLayout
from nanoserve.measures.metrics import MILLISECONDS, Distribution, request_distributions
from nanoserve.record.bubbles import StageShares, engine_seconds, stage_shares, working_seconds
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler

RATIOS = ("output_tokens_per_s", "ttft_ms", "tpot_ms", "e2el_ms")
"""Of the latencies, those of the means."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy on an engine."""

    policy: str
    engine: str
    """What it is called."""
    executor: Executor
    make_scheduler: Callable[[], Scheduler]
    workers: int
    tensor_parallel: int
    simulated: bool
    """As OpenEngine has them."""

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.engine}"

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Its parallel layout, as far as traces show it."""
        return (ParallelLayout(tensor_parallel=self.tensor_parallel),)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one variant's run."""

    seconds: float
    """From the first arrival to the last token."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    """Over requests."""
    steps: int
    """Micro-batches, and how their tokens, prompt tokens and decodes are distributed over them."""
    tokens: Distribution | None
    prompt_tokens: Distribution | None
    decodes: Distribution | None
    variation: float
    """Standard deviation of a micro-batch's tokens over their mean."""
    preemptions: int
    stages: tuple[StageShares, ...]
    """What each stage's time went into; none of one process."""
    engine_ms: float
    """That the engine took to make a plan, in the median."""
    engine_share: float
    """The sum of these over the time with something in flight."""
    floor_seconds: float
    """The sum of the floors of its micro-batches: their bytes and operations, on the whole machine."""
    simulated: Comparison | None
    """What the simulator makes of it; None where it has no model of the engine."""
    foreign_cores: float | None

    @property
    def bubbles(self) -> float | None:
        """Mean over the stages; None of one process."""
        return statistics.fmean(stage.bubbles for stage in self.stages) if self.stages else None

    def metric(self, name: str) -> float | None:
        """One of RATIOS."""
        value = getattr(self, name)
        return value.mean if isinstance(value, Distribution) else value


PipelineRound = VariantsRound[Figures]
"""Every variant once, with the same requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(VariantsBench[Variant, Figures]):
    """What the rounds of pipelines share."""

    cost: ModelCost
    limits: Limits
    """Of the model and of this machine, for the floor of each run."""

    def run(self, variant: Variant, number: int) -> RunRecord:
        return run_requests(
            variant.executor,
            variant.make_scheduler,
            self.make_requests(number),
            vocab_size=self.vocab_size,
            workers=variant.workers,
        )

    def figures(self, variant: Variant, record: RunRecord, foreign_cores: float | None) -> Figures:
        timings, seconds, plans = record.timings, record.makespan, record.plans
        outputs, inputs = sum(one.output_tokens for one in timings), sum(one.input_tokens for one in timings)
        shapes = [StepShape.of(plan) for plan in plans]
        tokens = [shape.tokens for shape in shapes]
        engine = engine_seconds(record)
        simulated = None
        if variant.simulated:
            simulated = compare_with_simulator(
                record,
                variant.make_scheduler,
                vocab_size=self.vocab_size,
                tensor_parallel=variant.tensor_parallel,
            )
        return Figures(
            seconds=seconds,
            output_tokens_per_s=outputs / seconds,
            total_tokens_per_s=(inputs + outputs) / seconds,
            requests=len(timings),
            **request_distributions(timings),
            steps=len(plans),
            tokens=Distribution.of(tokens),
            prompt_tokens=Distribution.of(shape.tokens - shape.decoding for shape in shapes),
            decodes=Distribution.of(shape.decoding for shape in shapes),
            variation=statistics.pstdev(tokens) / statistics.fmean(tokens),
            preemptions=record.preemptions,
            stages=tuple(stage_shares(record, variant.tensor_parallel)),
            engine_ms=statistics.median(engine) * MILLISECONDS,
            engine_share=sum(engine) / working_seconds(record),
            floor_seconds=sum(self.cost.floor_seconds(shape, self.limits) for shape in shapes),
            simulated=simulated,
            foreign_cores=foreign_cores,
        )


def pairs(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """What is held against what, and what that is called: variants, by name, that differ in one thing alone.

    Other policies are held against the first one on the same engine, the first engine against others under the same
    policy.
    """
    found = []
    split = [name.split(", ", 1) for name in names]
    first_policy, first_engine = split[0]
    for (policy, engine), (other_policy, other_engine) in combinations(split, 2):
        this, other = f"{policy}, {engine}", f"{other_policy}, {other_engine}"
        if engine == other_engine and policy == first_policy:
            found.append((f"{other_policy} over {policy}, {engine}", other, this))
        elif policy == other_policy and engine == first_engine:
            found.append((f"{engine} over {other_engine}, {policy}", this, other))
    return found
