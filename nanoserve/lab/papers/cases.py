"""One simulation, described by values; many of them side by side; and the same search for a setting
for all systems."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as replace_field
from itertools import chain, islice
from statistics import fmean
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import Efficiency, load_machine
from nanoserve.costs.predictor import layout_predictors
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.benchmarks.policies.variants import DecodePrioritizing, PrefillPrioritizing
from nanoserve.lab.papers.framework import Outcomes, Run
from nanoserve.lab.papers.observers import Breakdown, PhaseClock, Steady, SteadyWindow
from nanoserve.lab.simulator import SimulationResult, Workload, burst, poisson_arrivals, simulate
from nanoserve.lab.simulator.pipeline import COUPLED, DECOUPLED
from nanoserve.lab.simulator.workload import length_tables, lognormal_lengths, named_lengths
from nanoserve.lab.step_window import WindowStep
from nanoserve.layout import ParallelLayout
from nanoserve.record.metrics import Distribution, Slo, Spread
from nanoserve.request import RequestShape
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies import POLICIES, make_policy

BLOCK_SIZE = 16
TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096)
"""Tokens of a step: every system is tuned over all of these, in each case again."""
FREQUENT, RARE = "prefill-prioritizing", "decode-prioritizing"
_UNBUFFERED: Mapping[str, Callable[[int], Policy]] = MappingProxyType(
    {FREQUENT: PrefillPrioritizing, RARE: DecodePrioritizing}
)
"""Seesaw, figure 2 (a) and (b): re-sharding without tiered buffering. These policies exist only to
compare with."""
_RUNTIMES = MappingProxyType({"decoupled": DECOUPLED, "coupled": COUPLED})
_LOGNORMAL = MappingProxyType(
    {"livebench": (600.0, 400.0, 0.8, 0.7), "dolphin-r1": (200.0, 1000.0, 0.6, 0.5)}
)
"""APEX does not state these, so they are assumed: mean input and output tokens, and sigmas. The
first has instructions with medium answers, the second short questions with long chains of
thought."""
_SIGMA = 0.3  # spread of lengths whose means alone are known


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A serving system as far as the simulator knows one."""

    label: str  # name of the system in tables and pictures
    policy: str  # name of its policy in the registry, or FREQUENT or RARE
    token_budget: int = 2048  # tokens of a step at most
    # parameters of the policy that are not at their defaults
    parameters: tuple[tuple[str, Any], ...] = ()
    runtime: str = "decoupled"  # decoupled or coupled metadata (simulator/pipeline.py)
    # True where all devices divide every layer, instead of the layers among them
    tensor_parallel: bool = False

    def layout(self, devices: int) -> ParallelLayout:
        """How it spreads a model over that many devices, unless a case says otherwise."""
        if self.tensor_parallel:
            return ParallelLayout(tensor_parallel=devices)
        return ParallelLayout(pipeline_parallel=devices)

    def with_(self, label: str, **parameters: Any) -> "System":
        """Copy the system under another label, with further parameters of its policy."""
        return replace(self, label=label, parameters=self.parameters + tuple(parameters.items()))

    def make_policy(self) -> Policy:
        if self.policy in _UNBUFFERED:
            return _UNBUFFERED[self.policy](self.token_budget)
        return make_policy(self.policy, self.token_budget, dict(self.parameters))


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A system on hardware, and the requests that arrive. A SimulationJob."""

    system: System
    model: str
    machine: str
    """Names of the model's shape and of the machine."""
    layouts: tuple[ParallelLayout, ...] = (ParallelLayout(),)
    """How devices share the model; a second layout is the one for answers, to which Seesaw
    changes."""
    lengths: str  # see ``draw_lengths``
    longest: int | None = None  # requests of more tokens are left out
    requests: int
    rate: float | None = None
    """Requests per second, Poisson arrivals; None means all at once."""
    seed: int = 0  # seed of arrivals and lengths
    max_num_seqs: int = 4096  # sequences that hold blocks at a time
    pool: float = 1.0  # share of the KV blocks beside the weights that is used
    host_bytes: float | None = None
    """Host memory for each device, for policies that use it; None means all that the machine
    has."""
    # share of the CPU's data sheet that its attention reaches; None is the default
    processor: float | None = None
    all_reduce_scale: float = 1.0
    """Factor by which all-reduces, and what stages send, are faster: latency too, as Seesaw mutates
    a trace."""
    steady: tuple[float, float] | None = None
    """Between which shares of the first tokens the steady state is measured; None means not at
    all."""
    # whether the run ends with its steady state, for runs of which nothing else is read
    ends_steady: bool = False
    logged_steps: int = 0  # how many steps are kept from its beginning on
    slo: Slo | None = None

    @property
    def layout_name(self) -> str:
        """The layouts in Seesaw's notation, such as D2P4->D2T4."""
        return "->".join(layout.name for layout in self.layouts)

    def costs(self, layout: ParallelLayout | None = None) -> StepCosts:
        """Step times of one replica with that layout, or with the first; UsageError if it does not
        suit the machine."""
        machine = load_machine(self.machine)
        factor = self.all_reduce_scale
        link = replace_field(machine.link.scaled(factor), latency=machine.link.latency / factor)
        efficiency = Efficiency()
        if self.processor is not None:
            efficiency = Efficiency(processor=self.processor)
        machine = replace_field(machine, link=link)
        return StepCosts(
            load_shape(self.model), machine, layout or self.layouts[0], efficiency=efficiency
        )

    def shapes(self) -> Iterator[RequestShape]:
        """Lengths of all requests, in order."""
        drawn = draw_lengths(self.lengths, self.seed)
        fitting = (
            shape for shape in drawn if self.longest is None or shape.total_tokens <= self.longest
        )
        return islice(fitting, self.requests)

    def run(self) -> "Outcome":
        """Simulate it; with data parallelism, until the slowest replica is done.

        Raises DoesNotFit if the model does not, and ValueError if there are too few steps for the
        steady state.
        """
        system, layouts = self.system, [self.costs(layout) for layout in self.layouts]
        first, replicas = layouts[0], self.layouts[0].data_parallel
        blocks = [
            int(one.memory.kv_blocks(BLOCK_SIZE, system.token_budget) * self.pool)
            for one in layouts
        ]
        if system.policy in _UNBUFFERED:  # what stays on the devices must fit them in both layouts
            blocks = [min(blocks)] * len(blocks)
        host_blocks = 0
        if len(layouts) > 1 or POLICIES[system.policy].attends_on_host:
            host_bytes = self.host_bytes
            if host_bytes is None:
                host_bytes = first.machine.host_memory_bytes
            host_blocks = first.memory.host_kv_blocks(
                host_bytes * self.layouts[0].devices / replicas, BLOCK_SIZE
            )
        window, clock = SteadyWindow(self.requests, self.steady, self.logged_steps), PhaseClock()
        latencies: list[float] = []
        arrivals = burst()
        if self.rate is not None:
            arrivals = poisson_arrivals(self.rate, self.seed)
        result = simulate(
            system.make_policy(),
            first,
            Workload(arrivals, self.shapes()),
            num_blocks=blocks[0],
            block_size=BLOCK_SIZE,
            windows=first.counts.groups.windows,
            max_num_seqs=self.max_num_seqs,
            runtime=_RUNTIMES[system.runtime],
            observers=(window, clock),
            slo=self.slo,
            request_observers=[
                lambda request: latencies.append(request.e2el / request.output_tokens)
            ],
            replicas=replicas,
            host_blocks=host_blocks,
            other_layouts=list(zip(layouts[1:], blocks[1:], strict=True)),
            predictors=layout_predictors(layouts),
            is_over=lambda: self.ends_steady and window.is_over,
        )
        steady: Steady | None = None
        if self.steady:
            steady = window.result()
        return Outcome(
            result=result,
            window=steady,
            log=window.samples,
            latency_per_token=fmean(latencies),
            breakdown=clock.breakdown(result.seconds),
            phases=clock.phases(result.seconds),
            decodes=clock.decodes,
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a case."""

    result: SimulationResult  # the whole run, its start and its end included
    window: Steady | None  # the steady state between them, if it was asked for
    log: list[WindowStep]  # steps from the steady state's beginning on
    # seconds; mean over requests of the whole latency over the output tokens (APEX, figure 6)
    latency_per_token: float
    breakdown: Breakdown  # where the time of the first replica went
    phases: tuple[tuple[float, float, int], ...]
    """(begin, end, layout) of the times between transitions of the first replica."""
    decodes: float  # answers of a step without prompts, averaged over the time of these steps

    @property
    def steady(self) -> Steady:
        """The steady state of a case that asked for it."""
        assert self.window is not None, "the case asked for a steady state"
        return self.window


def draw_lengths(name: str, seed: int) -> Iterator[RequestShape]:
    """Lengths by name: those of ``named_lengths``, and those of APEX.

    "osc:200" is OSC with outputs scaled to a mean of 200. "1000:200" has these means and, as
    nothing more is known, a moderate lognormal spread. "livebench" and "dolphin-r1" are lognormal
    too.
    """
    kind, _, mean = name.partition(":")
    if kind == "osc" and mean:
        table = length_tables()["osc"]
        factor = float(mean) / table.mean_output
        drawn = table.draw(seed)
        return (
            RequestShape(shape.input_tokens, max(1, round(shape.output_tokens * factor)))
            for shape in drawn
        )
    if mean:
        return lognormal_lengths(float(kind), float(mean), _SIGMA, _SIGMA, seed)
    if kind in _LOGNORMAL:
        return lognormal_lengths(*_LOGNORMAL[kind], seed=seed)
    return named_lengths(name, seed)


Key = TypeVar("Key")
Metric = Callable[[Outcome], float]
"""One number of an outcome."""


def throughput(outcome: Outcome) -> float:
    """Prompt and output tokens per second, over all of the time."""
    return outcome.result.tokens_per_second


def mean_of(latency: str, milliseconds: float = 1.0) -> Metric:
    """The mean of one of a result's latencies, in units of `milliseconds`."""

    def metric(outcome: Outcome) -> float:
        found: Distribution | None = getattr(outcome.result, latency)
        assert found is not None, "an answer of the run has this latency"
        return found.mean / milliseconds

    return metric


def _run_largest_first(run: Run, cases: Iterable[Case]) -> Outcomes:
    """Large runs begin first, so that at the end no process computes one alone."""
    ordered = sorted(cases, key=lambda case: -case.requests)
    return run(ordered)


class Runs(Generic[Key]):
    """Cases by key, one for each seed, and their outcomes: how every figure runs and compares.

    Lists that are compared have equal length.
    """

    def __init__(self, run: Run, cases: Mapping[Key, Sequence[Case]]) -> None:
        self.cases = cases
        self._outcomes = _run_largest_first(run, chain.from_iterable(cases.values()))

    def outcomes(self, key: Key) -> list[Outcome]:
        """Outcomes in the order of the seeds."""
        return [self._outcomes[case] for case in self.cases[key]]

    def values(self, key: Key, metric: Metric) -> list[float]:
        return [metric(outcome) for outcome in self.outcomes(key)]

    def spread(self, key: Key, metric: Metric) -> Spread:
        return Spread.of(self.values(key, metric))

    def mean(self, key: Key, metric: Metric) -> float:
        return self.spread(key, metric).mean

    def means(self, key: Key, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Means of several metrics, by name."""
        return {name: self.mean(key, metric) for name, metric in metrics.items()}

    def ratios(self, above: Key, below: Key, metric: Metric) -> list[float]:
        """One metric of the first key's cases over that of the second's, pair by pair with equal
        seeds."""
        pairs = zip(self.values(above, metric), self.values(below, metric), strict=True)
        return [first / second for first, second in pairs]

    def ratio(self, above: Key, below: Key, metric: Metric) -> Spread:
        return Spread.of(self.ratios(above, below, metric))


def with_budget(case: Case, token_budget: int) -> Case:
    return replace(case, system=replace(case.system, token_budget=token_budget))


def tuned(
    cases: Sequence[Case], run: Run, score: Metric, budgets: Sequence[int] = TOKEN_BUDGETS
) -> list[Case]:
    """Each case with the token budget of the list whose outcome scores highest, the first of
    equals."""
    outcomes = _run_largest_first(
        run, (with_budget(case, budget) for case in cases for budget in budgets)
    )
    return [
        max((with_budget(case, budget) for budget in budgets), key=lambda one: score(outcomes[one]))
        for case in cases
    ]


def over_seeds(case: Case, seeds: Iterable[int]) -> list[Case]:
    return [replace(case, seed=seed) for seed in seeds]
