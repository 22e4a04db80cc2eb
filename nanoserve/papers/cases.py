"""One simulation, described by values: what runs it needs no more than that."""

from typing import Any

import msgspec

from nanoserve.costs import ParallelLayout, StepCosts, load_machine, load_shape
from nanoserve.measures.slo import Slo
from nanoserve.papers.observers import Steady, SteadyWindow, StepLog, StepSample
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator import SimulationResult, Workload, burst, poisson_arrivals, simulate
from nanoserve.simulator.named_lengths import named_lengths
from nanoserve.simulator.pipeline import COUPLED, DECOUPLED

BLOCK_SIZE = 16
_RUNTIMES = {"decoupled": DECOUPLED, "coupled": COUPLED}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A serving system as far as the simulator knows one."""

    label: str
    """Its name in tables and pictures."""
    policy: str
    """By its name in the registry."""
    token_budget: int = 2048
    """Of a step."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Of the policy, other than its defaults."""
    runtime: str = "decoupled"
    """Decoupled or coupled metadata (simulator/pipeline.py)."""
    tensor_parallel: bool = False
    """True where all devices divide every layer, instead of the layers among them."""

    def layout(self, devices: int) -> ParallelLayout:
        """On so many devices."""
        if self.tensor_parallel:
            return ParallelLayout(tensor_parallel=devices)
        return ParallelLayout(pipeline_parallel=devices)

    def with_(self, label: str, **parameters: Any) -> "System":
        """The same with other parameters of its policy."""
        return msgspec.structs.replace(self, label=label, parameters=(*self.parameters, *parameters.items()))


class SystemCase(msgspec.Struct, frozen=True, kw_only=True):
    """What every simulation of a system is described by, whatever else it takes."""

    system: System
    """What is simulated."""
    seed: int = 0
    """Of arrivals and lengths."""


class Case(SystemCase, frozen=True, kw_only=True):
    """A system on hardware, and the requests that come; a Job."""

    model: str
    machine: str
    devices: int
    """Which, and how many."""
    lengths: str
    """By name."""
    requests: int
    """How many."""
    rate: float | None = None
    """Of Poisson arrivals, per second; None means all at once."""
    max_num_seqs: int = 4096
    """Sequences that hold blocks at a time."""
    pool: float = 1.0
    """Share of the KV blocks beside the weights that is used."""
    steady: tuple[float, float] = (0.5, 0.95)
    """Between which shares of the first tokens the steady state is measured."""
    logged_steps: int = 0
    """How many steps are kept from its beginning on."""
    slo: Slo | None = None
    """What a good answer keeps to."""

    @property
    def name(self) -> str:
        rate = "all at once" if self.rate is None else f"{self.rate:g}/s"
        return f"{self.system.label}, {self.model} on {self.devices} of {self.machine}, {self.lengths}, {rate}"

    def costs(self) -> StepCosts:
        """The step times."""
        return StepCosts(load_shape(self.model), load_machine(self.machine), self.system.layout(self.devices))

    def run(self) -> "Outcome":
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
        return Outcome(result=result, steady=window.result(), log=log.samples)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a case came to."""

    result: SimulationResult
    """Of the whole run, its start and its end included."""
    steady: Steady
    """Of the window between them."""
    log: list[StepSample]
    """Steps from the window's beginning on."""
