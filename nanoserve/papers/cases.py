"""One simulation, described by values; many of them side by side; and the same search for a setting for all systems."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from nanoserve.costs import ParallelLayout, StepCosts, load_machine, load_shape
from nanoserve.measures.slo import Slo
from nanoserve.papers.claims import Spread
from nanoserve.papers.framework import Outcomes, Run
from nanoserve.papers.observers import Steady, SteadyWindow, StepLog, StepSample
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator import SimulationResult, Workload, burst, poisson_arrivals, simulate
from nanoserve.simulator.pipeline import COUPLED, DECOUPLED
from nanoserve.simulator.workload import named_lengths

BLOCK_SIZE = 16
_RUNTIMES = {"decoupled": DECOUPLED, "coupled": COUPLED}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A serving system as far as the simulator knows one."""

    label: str
    """Name of the system in tables and pictures."""
    policy: str
    """Name of its policy in the registry."""
    token_budget: int = 2048
    """Tokens of a step at most."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Parameters of the policy that are not at their defaults."""
    runtime: str = "decoupled"
    """Decoupled or coupled metadata (simulator/pipeline.py)."""
    tensor_parallel: bool = False
    """True where all devices divide every layer, instead of the layers among them."""

    def layout(self, devices: int) -> ParallelLayout:
        """How it spreads a model over that many devices."""
        if self.tensor_parallel:
            return ParallelLayout(tensor_parallel=devices)
        return ParallelLayout(pipeline_parallel=devices)

    def with_(self, label: str, **parameters: Any) -> "System":
        """The same system with other parameters of its policy."""
        return replace(self, label=label, parameters=(*self.parameters, *parameters.items()))


class SystemCase(msgspec.Struct, frozen=True, kw_only=True):
    """A simulation of a system: the fields that all of them have. A SimulationJob."""

    system: System
    """What is simulated."""
    seed: int = 0
    """Seed of arrivals and lengths."""

    @property
    def name(self) -> str:
        """Name for the progress line."""
        raise NotImplementedError

    def run(self) -> Any:
        """Simulate it."""
        raise NotImplementedError


AnyCase = TypeVar("AnyCase", bound=SystemCase)
AnyJob = TypeVar("AnyJob")
Key = TypeVar("Key")
Metric = Callable[[Any], float]
"""One number of an outcome."""

TOKEN_BUDGETS = (256, 512, 1024, 2048, 4096)
"""Tokens of a step: every system is tuned over all of these, in each case again."""


class Runs(Generic[Key, AnyJob]):
    """Jobs by key, one for each seed, and their outcomes: how every figure runs and compares.

    Args:
        run: runs them all at once.
        jobs: lists of equal length where they are compared.
    """

    def __init__(self, run: Run, jobs: Mapping[Key, Sequence[AnyJob]]) -> None:
        self.jobs = jobs
        self._outcomes: Outcomes = run(job for several in jobs.values() for job in several)  # type: ignore[misc]

    def outcomes(self, key: Key) -> list[Any]:
        """Outcomes in the order of the seeds."""
        return [self._outcomes[job] for job in self.jobs[key]]

    def values(self, key: Key, metric: Metric) -> list[float]:
        """One metric, seed by seed."""
        return [metric(outcome) for outcome in self.outcomes(key)]

    def spread(self, key: Key, metric: Metric) -> Spread:
        """One metric over seeds."""
        return Spread.of(self.values(key, metric))

    def mean(self, key: Key, metric: Metric) -> float:
        """Mean of one metric over seeds."""
        return self.spread(key, metric).mean

    def means(self, key: Key, metrics: Mapping[str, Metric]) -> dict[str, float]:
        """Means of several metrics, by name."""
        return {name: self.mean(key, metric) for name, metric in metrics.items()}

    def ratio(self, above: Key, below: Key, metric: Metric) -> Spread:
        """One metric of the first key's jobs over that of the second's, pair by pair with equal seeds."""
        pairs = zip(self.values(above, metric), self.values(below, metric), strict=True)
        return Spread.of(first / second for first, second in pairs)


def with_budget(case: AnyCase, token_budget: int) -> AnyCase:
    """The case with another token budget."""
    return replace(case, system=replace(case.system, token_budget=token_budget))


def tuned(cases: Sequence[AnyCase], run: Run, score: Metric, budgets: Sequence[int] = TOKEN_BUDGETS) -> list[AnyCase]:
    """Each case with the token budget of the list whose outcome scores highest, the first of equals."""
    outcomes = run(with_budget(case, budget) for case in cases for budget in budgets)

    def best(case: AnyCase) -> int:
        return max(budgets, key=lambda budget: score(outcomes[with_budget(case, budget)]))

    return [with_budget(case, best(case)) for case in cases]


def over_seeds(case: AnyCase, seeds: Iterable[int]) -> list[AnyCase]:
    """The case with each seed."""
    return [replace(case, seed=seed) for seed in seeds]


class PipelineCase(SystemCase, frozen=True, kw_only=True):
    """A system on hardware, and the requests that arrive."""

    model: str
    machine: str
    devices: int
    """Names of model and machine, and how many devices."""
    lengths: str
    """Name of a distribution of lengths."""
    requests: int
    """Number of requests."""
    rate: float | None = None
    """Requests per second, Poisson arrivals; None means all at once."""
    max_num_seqs: int = 4096
    """Sequences that hold blocks at a time."""
    pool: float = 1.0
    """Share of the KV blocks beside the weights that is used."""
    steady: tuple[float, float] = (0.5, 0.95)
    """Between which shares of the first tokens the steady state is measured."""
    logged_steps: int = 0
    """How many steps are kept from its beginning on."""
    slo: Slo | None = None
    """Limits of a good answer."""

    @property
    def name(self) -> str:
        rate = "all at once" if self.rate is None else f"{self.rate:g}/s"
        return f"{self.system.label}, {self.model} on {self.devices} of {self.machine}, {self.lengths}, {rate}"

    def costs(self) -> StepCosts:
        """The step times."""
        return StepCosts(load_shape(self.model), load_machine(self.machine), self.system.layout(self.devices))

    def run(self) -> "PipelineOutcome":
        """Simulate it.

        Raises:
            DoesNotFit: if the model does not.
        """
        costs = self.costs()
        window = SteadyWindow(self.requests, *self.steady)
        log = StepLog(window, self.logged_steps)
        arrivals = burst() if self.rate is None else poisson_arrivals(self.rate, self.seed)
        result = simulate(
            make_policy(self.system.policy, self.system.token_budget, dict(self.system.parameters)),
            costs,
            Workload(arrivals, named_lengths(self.lengths, self.seed), self.requests),
            num_blocks=int(costs.memory.kv_blocks(BLOCK_SIZE, self.system.token_budget) * self.pool),
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            runtime=_RUNTIMES[self.system.runtime],
            observers=(window, log),
            slo=self.slo,
        )
        return PipelineOutcome(result=result, steady=window.result(), log=log.samples)


class PipelineOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a case came to."""

    result: SimulationResult
    """The whole run, its start and its end included."""
    steady: Steady
    """The window between them."""
    log: list[StepSample]
    """Steps from the window's beginning on."""
