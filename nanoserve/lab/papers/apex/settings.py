"""The platforms, workloads and systems of APEX, section 5.1, and one simulation of a device with
host memory.

The paper states neither how requests arrive nor, but for figure 7's mean input, how long they are.
Here throughput is that of a closed batch, several times what the device's memory holds, over all of
its time; latency is measured with Poisson arrivals.
"""

from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import Efficiency, load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.papers.cases import BLOCK_SIZE, Case, System, draw_lengths
from nanoserve.lab.papers.framework import Scale

DEVICE = System(label="device only", policy="sarathi", parameters=(("admission_reserve", False),))
"""vLLM and SwiftLLM: Sarathi-Serve's policy on the same runtime, without host memory and
nanoserve's own reserve."""
NEO = System(label="NEO", policy="neo")
OVERLAP = System(label="overlap", policy="overlap")
APEX = System(label="APEX", policy="apex", parameters=(("minimum_ratio", 0.0),))
"""Algorithm 1. Nothing has to be amortised here: starting the simulated CPU thread costs
nothing."""
APEX_8 = System(label="APEX, from 8x", policy="apex")
"""APEX with section 4.2's threshold: eight times as many host sequences as device decodes."""
HYBRID = System(label="hybrid (ours)", policy="hybrid")
SYSTEMS = (DEVICE, NEO, OVERLAP, APEX, HYBRID)

PAPERS_SHARE = 0.1
"""Share of the CPUs' data sheet at which they attend a tenth as fast as the device: "less than 10
%" in section 2.4."""
NEO_KERNEL = System(label="NEO, its kernel", policy="neo")
"""With half of the others' share: in large batches APEX's kernel is "up to twice" as fast as NEO's
(section 4.1)."""

# tokens of a step: every system is tuned over these, in every backlog again
TOKEN_BUDGETS = (256, 1024)

OUTPUTS = (50, 200, 500, 1000)
ALL_OUTPUTS = (50, 100, 200, 300, 500, 700, 1000)
COMPARED = (DEVICE, NEO, NEO_KERNEL, OVERLAP, APEX, HYBRID)


@dataclass(frozen=True)
class Platform:
    """A row of table 1 with the model that runs there."""

    name: str
    model: str
    machine: str

    def costs(self, processor: float | None = None) -> StepCosts:
        """Step times; with another share of the CPU's data sheet than the default one."""
        efficiency = Efficiency()
        if processor is not None:
            efficiency = Efficiency(processor=processor)
        return StepCosts(load_shape(self.model), load_machine(self.machine), efficiency=efficiency)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that the device's memory holds with the largest budget."""
        return self.costs().memory.kv_blocks(BLOCK_SIZE, max(TOKEN_BUDGETS)) * BLOCK_SIZE


A10 = Platform("A10", "llama-3.1-8b", "apex-a10")
T4 = Platform("T4", "llama-2-7b", "apex-t4")


@dataclass(frozen=True)
class HostBacklog:
    """A platform and the requests that come to it at once."""

    platform: Platform
    lengths: str
    """See ``draw_lengths``."""
    requests: int
    processor: float | None = None
    """Share of the CPUs' data sheet that attention reaches; None is the default."""
    systems: tuple[System, ...] = SYSTEMS  # systems that are compared

    def case(self, system: System, seed: int = 0) -> Case:
        """One system's. Requests that the device's memory cannot hold are left out, for all budgets
        alike."""
        processor = self.processor
        if system is DEVICE:
            processor = None
        elif system is NEO_KERNEL and processor is not None:
            processor /= 2
        return Case(
            system=system,
            model=self.platform.model,
            machine=self.platform.machine,
            lengths=self.lengths,
            longest=self.platform.longest,
            requests=self.requests,
            max_num_seqs=self.requests,
            processor=processor,
            seed=seed,
        )


def large_backlog(platform: Platform, lengths: str, scale: Scale) -> HostBacklog:
    """Where the CPUs are as slow as in the paper: 30 times what an A10 holds, or 100 times what a
    T4 does."""
    requests = scale.pick(300, 1000)
    if platform == A10:
        requests = scale.pick(1000, 3000)
    return HostBacklog(platform, lengths, requests, PAPERS_SHARE, COMPARED)


def mean_lengths(name: str) -> tuple[float, float]:
    """Mean tokens in and out of a name's lengths."""
    shapes = list(islice(draw_lengths(name, 0), 2000))
    return fmean(shape.input_tokens for shape in shapes), fmean(
        shape.output_tokens for shape in shapes
    )
