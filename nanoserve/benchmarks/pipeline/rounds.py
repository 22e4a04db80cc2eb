"""Policies and engines in interleaved rounds: what each made of the same requests, and their ratios. No torch."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.floors import Limits, ModelCost, StepShape
from nanoserve.benchmarks.pipeline.running import PipelineRun, run_requests
from nanoserve.benchmarks.pipeline.simulated import Comparison, compare_with_simulator
from nanoserve.benchmarks.pipeline.stages import StageShares, engine_seconds, stage_shares, working_seconds
from nanoserve.benchmarks.rounds import GIGA, Bracketed, bandwidth_states, until_enough_count
from nanoserve.measures.metrics import MILLISECONDS, Distribution, request_distributions
from nanoserve.request import Request
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler

RATIOS = ("output_tokens_per_s", "ttft_ms", "tpot_ms", "e2el_ms")
"""Of the latencies, those of the means."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy on an engine.

    Attributes:
        engine: what it is called.
        workers, tensor_parallel, simulated: as OpenEngine has them.
    """

    policy: str
    engine: str
    executor: Executor
    make_scheduler: Callable[[], Scheduler]
    workers: int
    tensor_parallel: int
    simulated: bool

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.engine}"


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one contender's run.

    Attributes:
        seconds: from the first arrival to the last token.
        ttft_ms, tpot_ms, itl_ms, e2el_ms: over requests.
        steps: micro-batches, and how their tokens, prompt tokens and decodes are distributed over them.
        variation: standard deviation of a micro-batch's tokens over their mean.
        stages: what each stage's time went into; none of one process.
        engine_ms: that the engine took to make a plan, in the median.
        engine_share: the sum of these over the time with something in flight.
        floor_seconds: the sum of the floors of its micro-batches: their bytes and operations, on the whole machine.
        simulated: what the simulator makes of it; None where it has no model of the engine.
    """

    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests: int
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2el_ms: Distribution | None
    steps: int
    tokens: Distribution | None
    prompt_tokens: Distribution | None
    decodes: Distribution | None
    variation: float
    preemptions: int
    stages: tuple[StageShares, ...]
    engine_ms: float
    engine_share: float
    floor_seconds: float
    simulated: Comparison | None
    foreign_cores: float | None

    @property
    def bubbles(self) -> float | None:
        """Mean over the stages; None of one process."""
        return statistics.fmean(stage.bubbles for stage in self.stages) if self.stages else None

    def metric(self, name: str) -> float | None:
        """One of RATIOS."""
        value = getattr(self, name)
        return value.mean if isinstance(value, Distribution) else value


class PipelineRound(Bracketed, frozen=True, kw_only=True):
    """Every contender once, with the same requests."""

    contenders: dict[str, Figures]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rounds share.

    Attributes:
        case: what the requests are, in a few words.
        make_requests: those of a round, by its number; 0 is the warm-up.
        keep: is given each measured run as it is done.
    """

    case: str
    contenders: Sequence[Contender]
    make_requests: Callable[[int], list[Request]]
    vocab_size: int
    cost: ModelCost
    limits: Limits
    probe: Callable[[], float]
    foreign: ForeignLoad
    keep: Callable[[Contender, PipelineRun], None]

    def warm_up(self) -> None:
        """Run every contender once, unmeasured."""
        for contender in self.contenders:
            self._run(contender, 0)

    def rounds(self, wanted: int) -> Iterator[PipelineRound]:
        """As they are done, until enough count or too many were tried; each begins with another contender."""
        return until_enough_count(self._round, wanted)

    def _round(self, number: int) -> PipelineRound:
        turn = (number - 1) % len(self.contenders)
        before = self.probe() / GIGA
        done: dict[str, Figures] = {}
        for contender in [*self.contenders[turn:], *self.contenders[:turn]]:
            self.foreign.read()
            run = self._run(contender, number)
            load = self.foreign.read()
            done[contender.name] = self._figures(contender, run, load)
            self.keep(contender, run)
        loads = [figures.foreign_cores for figures in done.values() if figures.foreign_cores is not None]
        return PipelineRound(
            case=self.case,
            number=number,
            bandwidth_before=before,
            bandwidth_after=self.probe() / GIGA,
            foreign_cores=max(loads, default=None),
            contenders={contender.name: done[contender.name] for contender in self.contenders},
        )

    def _run(self, contender: Contender, number: int) -> PipelineRun:
        return run_requests(
            contender.executor,
            contender.make_scheduler,
            self.make_requests(number),
            vocab_size=self.vocab_size,
            workers=contender.workers,
        )

    def _figures(self, contender: Contender, run: PipelineRun, foreign_cores: float | None) -> Figures:
        timings, seconds, plans = run.outcome.timings, run.outcome.makespan, run.record.plans
        outputs, inputs = sum(one.output_tokens for one in timings), sum(one.input_tokens for one in timings)
        shapes = [StepShape.of(plan) for plan in plans]
        tokens = [shape.tokens for shape in shapes]
        engine = engine_seconds(run)
        simulated = None
        if contender.simulated:
            simulated = compare_with_simulator(
                run,
                contender.make_scheduler,
                vocab_size=self.vocab_size,
                tensor_parallel=contender.tensor_parallel,
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
            preemptions=run.preemptions,
            stages=tuple(stage_shares(run, contender.tensor_parallel)),
            engine_ms=statistics.median(engine) * MILLISECONDS,
            engine_share=sum(engine) / working_seconds(run),
            floor_seconds=sum(self.cost.floor_seconds(shape, self.limits) for shape in shapes),
            simulated=simulated,
            foreign_cores=foreign_cores,
        )


class Ratio(msgspec.Struct, frozen=True):
    """One contender over another, in the rounds of one bandwidth state."""

    contenders: str
    metric: str
    state: str
    rounds: int
    median: float
    low: float
    high: float


def pairs(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """What is held against what, and what that is called: contenders, by name, that differ in one thing alone.

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


def ratios(rounds: Sequence[PipelineRound], held: Sequence[tuple[str, str, str]]) -> list[Ratio]:
    """Medians and extremes of each pair, metric and bandwidth state; formed within a round, never across rounds."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for place, state in sorted(bandwidth_states(rounds).items()):
        for (called, metric), ratio in _ratios_within(rounds[place], held).items():
            values.setdefault((called, metric, state), []).append(ratio)
    return [
        Ratio(*key, rounds=len(found), median=statistics.median(found), low=min(found), high=max(found))
        for key, found in values.items()
    ]


def _ratios_within(done: PipelineRound, held: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str], float]:
    found = {}
    for called, over, under in held:
        for metric in RATIOS:
            above, below = done.contenders[over].metric(metric), done.contenders[under].metric(metric)
            if above is not None and below is not None:
                found[called, metric] = above / below
    return found


def samples(rounds: Sequence[PipelineRound]) -> dict[str, dict[str, list[float]]]:
    """The figures of every counting round, for ``bench diff``."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        for name, figures in done.contenders.items() if done.counts else ():
            for metric in RATIOS:
                value = figures.metric(metric)
                if value is not None:
                    found.setdefault(name, {}).setdefault(metric, []).append(value)
    return found


def summarize(rounds: Sequence[PipelineRound]) -> list[dict[str, Any]]:
    """For every state and contender: medians over the counting rounds of what tables show."""
    groups: dict[tuple[str, str], list[Figures]] = {}
    for place, state in sorted(bandwidth_states(rounds).items()):
        for name, figures in rounds[place].contenders.items():
            groups.setdefault((state, name), []).append(figures)
    return [{"contender": name, "state": state, **_medians(found)} for (state, name), found in groups.items()]


def _medians(found: Sequence[Figures]) -> dict[str, Any]:
    return {"rounds": len(found), **_median([msgspec.to_builtins(figures) for figures in found])}


def _median(values: Sequence[Any]) -> Any:
    """Of equally built values, number by number; what lies in a list is found by its place, as "0"."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list | tuple):
        known = [{str(place): part for place, part in enumerate(value)} for value in known]
    if isinstance(known[0], dict):
        return {name: _median([value[name] for value in known]) for name in known[0]}
    return statistics.median(known)
