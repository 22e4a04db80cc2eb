"""What Seesaw's evaluation (section 6.1) runs: models, machines and requests, and the ways to spread them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import msgspec

from nanoserve.costs import Machine, ParallelLayout, StepCosts, load_machine, load_shape
from nanoserve.costs.counts import tensor_degrees
from nanoserve.costs.hardware import GIBI, Link
from nanoserve.costs.memory import DoesNotFit
from nanoserve.measures.workloads import RequestShape
from nanoserve.simulator.workload import named_lengths

BLOCK_SIZE = 16
LONGEST = 4096
"""Tokens of a request, prompt and answer: what LLaMA2-70B can hold, and where the paper's figure 9 ends."""
STATIC, WHOLE_PROMPTS, RESHARDING = "sarathi", "prefill-first", "seesaw"
"""Policies: vLLM with and without chunked prefill, and Seesaw."""
HOST_BYTES_PER_DEVICE = 80 * GIBI
"""Section 6.1."""


class OfflineBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine, and a closed batch of requests."""

    model: str
    machine: str
    devices: int
    """Number of the machine's devices that are used."""
    lengths: str
    """Name of the requests' lengths; requests longer than ``LONGEST`` are left out."""
    requests: int
    """Number of requests."""
    all_reduce_scale: float = 1.0
    """Figure 14: all-reduces (and what stages send) take their time over this."""
    host_bytes_per_device: float = HOST_BYTES_PER_DEVICE
    """Size of the pool in which Seesaw keeps prompts."""
    seed: int = 0
    """Seed of the lengths."""

    @property
    def name(self) -> str:
        scaled = "" if self.all_reduce_scale == 1.0 else f", all-reduces x{self.all_reduce_scale:g}"
        return f"{self.model} on {self.devices} of {self.machine}, {self.requests} of {self.lengths}{scaled}"

    def costs(self, layout: ParallelLayout) -> StepCosts:
        """Step times of one replica.

        Raises:
            UsageError: if the layout does not suit the model or the machine.
        """
        return StepCosts(load_shape(self.model), self._machine(), layout)

    def _machine(self) -> Machine:
        machine = load_machine(self.machine)
        return replace(machine, link=_faster(machine.link, self.all_reduce_scale))

    def shapes(self) -> list[RequestShape]:
        """Lengths of all requests, in order."""
        return list(islice(self._fitting(), self.requests))

    def _fitting(self) -> Iterator[RequestShape]:
        for shape in named_lengths(self.lengths, self.seed):
            if shape.total_tokens <= LONGEST:
                yield shape

    def layouts(self) -> list[ParallelLayout]:
        """All ways to spread the model over all devices that leave room for the longest request, D x T x P."""
        model = load_shape(self.model)
        found = []
        for tensor in tensor_degrees(model):
            for data in range(1, self.devices // tensor + 1):
                if self.devices % (tensor * data) == 0:
                    stages = self.devices // (tensor * data)
                    found.append(ParallelLayout(data_parallel=data, tensor_parallel=tensor, pipeline_parallel=stages))
        return [layout for layout in found if self._fits(layout)]

    def _fits(self, layout: ParallelLayout) -> bool:
        try:
            return self.costs(layout).memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE > LONGEST
        except DoesNotFit:
            return False


def _faster(link: Link, factor: float) -> Link:
    """The whole time of a message is divided, as the paper mutates the all-reduces of a trace: latency too."""
    return replace(link.scaled(factor), latency=link.latency / factor)


class LayoutChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A layout, or one for prompts and one for answers, and the tokens of a step."""

    prefill: ParallelLayout
    """The layout; of prompts only, if there is another for answers."""
    decode: ParallelLayout | None = None
    """The layout of answers; None where one serves both: a static configuration."""
    policy: str = STATIC
    """Name of the policy in the registry."""
    token_budget: int = 2048
    """Tokens of a step at most."""

    @property
    def label(self) -> str:
        """The name in the paper's notation, such as D2P4->D2T4."""
        return self.prefill.name if self.decode is None else f"{self.prefill.name}->{self.decode.name}"

    @property
    def replicas(self) -> int:
        """Data parallel degree, equal in both layouts."""
        return self.prefill.data_parallel
