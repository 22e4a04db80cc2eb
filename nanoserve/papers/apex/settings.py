"""The platforms, workloads and systems of APEX, section 5.1, and one simulation of a device with host memory.

The paper states neither how requests arrive nor, but for figure 7's mean input, how long they are. Here throughput is
that of a closed batch, several times what the device's memory holds, over all of its time; latency is measured with
Poisson arrivals.
"""

from collections.abc import Iterator
from itertools import islice

import msgspec

from nanoserve.costs import Efficiency, StepCosts, load_machine, load_shape
from nanoserve.costs.predictor import CostPredictor
from nanoserve.measures.workloads import RequestShape
from nanoserve.papers.cases import BLOCK_SIZE, System, SystemCase
from nanoserve.record.metrics import CompletedRequest
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator import SimulationResult, Workload, burst, poisson_arrivals, simulate
from nanoserve.simulator.workload import load_length_table, lognormal_lengths

DEVICE = System(label="device only", policy="sarathi", parameters=(("admission_reserve", False),))
"""vLLM and SwiftLLM: Sarathi-Serve's policy on the same runtime, without host memory and nanoserve's own reserve."""
NEO = System(label="NEO", policy="neo")
OVERLAP = System(label="overlap", policy="overlap")
APEX = System(label="APEX", policy="apex", parameters=(("minimum_ratio", 0.0),))
"""Algorithm 1. Nothing has to be amortised here: starting the simulated CPU thread costs nothing."""
APEX_8 = System(label="APEX, from 8x", policy="apex")
"""The same with section 4.2's threshold: eight times as many host sequences as device decodes."""
HYBRID = System(label="hybrid (ours)", policy="hybrid")
SYSTEMS = (DEVICE, NEO, OVERLAP, APEX, HYBRID)

PAPERS_SHARE = 0.1
"""Share of the CPUs' data sheet at which they attend a tenth as fast as the device: "less than 10 %" in section 2.4."""
NEO_KERNEL = System(label="NEO, its kernel", policy="neo")
"""With half of the others' share: in large batches APEX's kernel is "up to twice" as fast as NEO's (section 4.1)."""

TOKEN_BUDGETS = (256, 1024)
"""Tokens of a step: every system is tuned over these, in every backlog again."""

_LOGNORMAL = {"livebench": (600.0, 400.0, 0.8, 0.7), "dolphin-r1": (200.0, 1000.0, 0.6, 0.5)}
"""Assumed, for the paper does not say: mean input and output tokens, and sigmas. Instructions with medium answers, and
short questions with long chains of thought."""
_INPUT_OF_FIGURE_7, _SIGMA_OF_FIGURE_7 = 1000.0, 0.3


class Platform(msgspec.Struct, frozen=True):
    """A row of table 1 with the model that runs there."""

    name: str
    model: str
    machine: str

    def costs(self, processor: float | None = None) -> StepCosts:
        """Step times; with another share of the CPU's data sheet than the default one."""
        efficiency = Efficiency() if processor is None else Efficiency(processor=processor)
        return StepCosts(load_shape(self.model), load_machine(self.machine), efficiency=efficiency)


A10 = Platform("A10", "llama-3.1-8b", "apex-a10")
T4 = Platform("T4", "llama-2-7b", "apex-t4")


class HostCase(SystemCase, frozen=True, kw_only=True):
    """A system on a platform, and the requests that arrive."""

    platform: Platform
    lengths: str
    """See ``draw_lengths``."""
    requests: int
    """Number of requests."""
    rate: float | None = None
    """Requests per second, Poisson arrivals; None means all at once."""
    processor: float | None = None
    """Share of the CPU's data sheet that its attention reaches; None is the default."""

    @property
    def name(self) -> str:
        rate = "all at once" if self.rate is None else f"{self.rate:.2g}/s"
        return f"{self.system.label}, {self.platform.name}, {self.lengths}, {rate}"

    def shapes(self) -> Iterator[RequestShape]:
        """The requests' lengths, equal for all budgets; requests that the device's memory cannot hold are left out."""
        room = self.platform.costs().memory.kv_blocks(BLOCK_SIZE, max(TOKEN_BUDGETS)) * BLOCK_SIZE
        return (shape for shape in draw_lengths(self.lengths, self.seed) if shape.total_tokens <= room)

    def run(self) -> "HostOutcome":
        """Simulate it."""
        costs, system = self.platform.costs(self.processor), self.system
        host_memory = 0.0 if system.policy == DEVICE.policy else costs.machine.host_memory_bytes
        meter = _LatencyMeter()
        result = simulate(
            make_policy(system.policy, system.token_budget, dict(system.parameters)),
            costs,
            Workload(
                burst() if self.rate is None else poisson_arrivals(self.rate, self.seed),
                self.shapes(),
                self.requests,
            ),
            num_blocks=costs.memory.kv_blocks(BLOCK_SIZE, system.token_budget),
            block_size=BLOCK_SIZE,
            max_num_seqs=self.requests,
            host_blocks=costs.memory.host_kv_blocks(host_memory, BLOCK_SIZE),
            predictors=[CostPredictor(costs)],
            request_observers=[meter],
        )
        return HostOutcome(result=result, latency_per_token=meter.mean)


class HostOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a case came to."""

    result: SimulationResult
    latency_per_token: float
    """Seconds; mean over requests of the whole latency over the output tokens (figure 6)."""


class _LatencyMeter:
    """A RequestObserver: figure 6's latency per token."""

    def __init__(self) -> None:
        self._sum, self._requests = 0.0, 0

    def __call__(self, request: CompletedRequest) -> None:
        self._sum += request.e2el / request.output_tokens
        self._requests += 1

    @property
    def mean(self) -> float:
        return self._sum / self._requests


def draw_lengths(name: str, seed: int) -> Iterator[RequestShape]:
    """Lengths by name: "osc:200" is OSC with outputs scaled to a mean of 200, "1000:200" figure 7's, the others plain.

    Those of figure 7 have a mean input of 1000 tokens and, for want of better knowledge, a moderate lognormal spread.
    """
    kind, _, mean = name.partition(":")
    if kind == "osc":
        table = load_length_table("osc")
        factor = float(mean) / table.mean_output
        return (
            RequestShape(shape.input_tokens, max(1, round(shape.output_tokens * factor))) for shape in table.draw(seed)
        )
    if mean:
        return lognormal_lengths(_INPUT_OF_FIGURE_7, float(mean), _SIGMA_OF_FIGURE_7, _SIGMA_OF_FIGURE_7, seed)
    if kind in _LOGNORMAL:
        return lognormal_lengths(*_LOGNORMAL[kind], seed=seed)
    return load_length_table(kind).draw(seed)


def mean_lengths(name: str) -> tuple[float, float]:
    """Mean tokens in and out of a name's lengths."""
    shapes = list(islice(draw_lengths(name, 0), 2000))
    inputs, outputs = (
        sum(sizes) / len(shapes) for sizes in zip(*((s.input_tokens, s.output_tokens) for s in shapes), strict=True)
    )
    return inputs, outputs


def throughput(outcome: HostOutcome) -> float:
    """Prompt and output tokens per second, over all of the time."""
    return outcome.result.tokens_per_second
