"""What ``nanoserve simulate`` is asked for: the hardware, and the requests that come."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nanoserve.commands.bench_options import WORK_PANEL, work_option
from nanoserve.commands.options import option
from nanoserve.commands.workers_options import parsed_split
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.costs import ParallelLayout, StepCosts
    from nanoserve.scheduler.load import Policy
    from nanoserve.simulator import Runtime, Workload

HARDWARE_PANEL = "Hardware"
MOST_AT_A_TIME = 2**30
"""Of tokens in a step, and of sequences: more than there can be, and few enough to be counted with."""
MOST_BLOCKS = 2**24
"""Each takes some 40 bytes here."""
_MOST_REQUESTS = 10_000_000
_LARGEST_BLOCK = 2**20


def hardware_option(
    name: str, help: str, metavar: str = "N", minimum: int | None = None, maximum: int | None = None
) -> object:
    """An option of the hardware panel, without an environment variable."""
    limits = {key: limit for key, limit in (("min", minimum), ("max", maximum)) if limit is not None}
    return option(name, panel=HARDWARE_PANEL, help=help, metavar=metavar, envvar=None, **limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Who decides, and within which limits."""

    policy: Annotated[
        str,
        work_option(
            "--policy", help="Each on its own, as throttling:iterations=4 with parameters.", metavar="NAME,NAME"
        ),
    ] = "throttling"
    set_for_all: Annotated[str | None, option("--set", panel=WORK_PANEL, help="", envvar=None, hidden=True)] = None
    token_budget: Annotated[
        int, work_option("--max-num-batched-tokens", help="Token budget of a step.", min=1, max=MOST_AT_A_TIME)
    ] = 2048
    max_num_seqs: Annotated[
        int, work_option("--max-num-seqs", help="Most sequences at a time.", min=1, max=MOST_AT_A_TIME)
    ] = 2048

    def by_name(self) -> "dict[str, Policy]":
        """Those that were named, in that order.

        Raises:
            UsageError: for an unknown policy, and for parameters that it does not have or that make no sense.
        """
        from nanoserve.benchmarks.policy_names import parse_policies

        if self.set_for_all is not None:
            raise UsageError("--set is no more: parameters stand behind a policy's name, as throttling:iterations=4")
        return parse_policies(self.policy, self.token_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """What is simulated."""

    model: Annotated[str, hardware_option("--model", "A model's name, or its config.json.", "MODEL")] = "qwen2.5-32b"
    hardware: Annotated[str, hardware_option("--hardware", "A machine or device, or a TOML file.", "NAME")] = "gllm-l20"
    stages: Annotated[int, hardware_option("--stages", "Stages of the pipeline.", minimum=1)] = 4
    tensor_parallel: Annotated[int, hardware_option("--tensor-parallel", "Devices of a stage.", minimum=1)] = 1
    pp_split: Annotated[
        str | None, hardware_option("--pp-split", "Layers of each stage, as 14,14; default: by cost.", "N,N")
    ] = None
    block_size: Annotated[
        int, hardware_option("--block-size", "Tokens of a KV block.", minimum=1, maximum=_LARGEST_BLOCK)
    ] = 16
    num_blocks: Annotated[
        int | None,
        hardware_option(
            "--num-blocks", "KV blocks; default: what fits beside the weights.", minimum=1, maximum=MOST_BLOCKS
        ),
    ] = None
    metadata: Annotated[
        str,
        hardware_option(
            "--metadata", "decoupled: sent ahead, as gLLM; coupled: with the activations, as vLLM.", "NAME"
        ),
    ] = "decoupled"
    profile: Annotated[
        Path | None,
        hardware_option("--profile", "Model and machine as nanoserve profile measured them; one stage.", "FILE"),
    ] = None

    def costs(self, layout: "ParallelLayout | None" = None) -> "StepCosts":
        """The step times, of another layout than the options' if it is given.

        Raises:
            UsageError: for an unknown model or machine, or a layout that suits neither.
        """
        from nanoserve.costs import ParallelLayout, StepCosts, load_machine, load_shape

        own = ParallelLayout(pipeline_parallel=self.stages, tensor_parallel=self.tensor_parallel)
        split = parsed_split(self.pp_split)
        if split is not None and len(split) != self.stages:
            raise UsageError(f"--pp-split {self.pp_split} names {len(split)} stages, but --stages is {self.stages}")
        return StepCosts(load_shape(self.model), load_machine(self.hardware), layout or own, pipeline_split=split)

    def kv_blocks(self, costs: "StepCosts", step_tokens: int) -> int:
        """Those that were asked for, or as many as fit beside the weights and a step of so many tokens.

        Raises:
            UsageError: if they do not fit.
        """
        fitting = costs.memory.kv_blocks(self.block_size, step_tokens)
        if self.num_blocks is None and fitting > MOST_BLOCKS:
            raise UsageError(f"{fitting:,d} KV blocks fit, more than can be simulated: give --num-blocks")
        if self.num_blocks is None:
            return fitting
        if self.num_blocks > fitting:
            raise UsageError(
                f"--num-blocks {self.num_blocks}: only {fitting} blocks of {self.block_size} tokens fit beside the "
                f"weights in layout {costs.layout.name}; ask for fewer, or for more devices"
            )
        return self.num_blocks

    def runtime(self) -> "Runtime":
        """How the stages' processes work together.

        Raises:
            UsageError: for an unknown way.
        """
        from nanoserve.simulator.pipeline import COUPLED, DECOUPLED

        runtimes = {"decoupled": DECOUPLED, "coupled": COUPLED}
        if self.metadata not in runtimes:
            raise UsageError(f"--metadata {self.metadata!r} is not one of {', '.join(runtimes)}")
        return runtimes[self.metadata]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """When requests come and how long they are."""

    requests: Annotated[int, work_option("--requests", help="How many.", min=1, max=_MOST_REQUESTS)] = 1000
    rate: Annotated[
        float | None,
        work_option("--rate", help="Requests per second; default: all at once, or as the trace has them."),
    ] = None
    variation: Annotated[
        float, work_option("--variation", help="Of the gaps: 1 is Poisson, more comes in bursts (gamma).")
    ] = 1.0
    lengths: Annotated[
        str | None,
        work_option("--lengths", help="IN+OUT tokens, or a name (default: sharegpt-gllm).", metavar="NAME"),
    ] = None
    trace: Annotated[
        Path | None, work_option("--trace", help="Lengths and times from a CSV file instead.", metavar="FILE")
    ] = None
    seed: Annotated[int, option("--seed", panel=WORK_PANEL, help="Of arrivals and lengths.", envvar=None, min=0)] = 0

    @property
    def name(self) -> str:
        """Whose requests, and when, for the title of a table."""
        from nanoserve.simulator.named_lengths import GLLMS_SHAREGPT

        lengths = self.trace.name if self.trace else self.lengths or GLLMS_SHAREGPT
        together = "as the trace has them" if self.trace else "all at once"
        return f"{lengths}, {together if self.rate is None else f'{self.rate:g} a second'}"

    def workload(self) -> "Workload":
        """The requests; each call makes the same ones.

        Raises:
            UsageError: for a rate, a name or a trace that makes no sense.
        """
        from nanoserve.measures.workloads import read_arrivals, read_trace
        from nanoserve.simulator import Workload, burst, gamma_arrivals, trace_arrivals, trace_lengths
        from nanoserve.simulator.named_lengths import GLLMS_SHAREGPT, named_lengths

        if self.trace is not None and self.lengths is not None:
            raise UsageError("give --lengths or --trace, not both")
        if self.rate is None and self.variation != 1:
            raise UsageError("--variation is of the gaps that --rate makes: give both")
        if self.rate is not None:
            arrivals = gamma_arrivals(self.rate, self.variation, self.seed)
        else:
            traced = None if self.trace is None else read_arrivals(self.trace, self.requests, in_order=True)
            arrivals = burst() if traced is None else trace_arrivals(traced)
        if self.trace is not None:
            lengths = trace_lengths(read_trace(self.trace, self.requests))
        else:
            lengths = named_lengths(GLLMS_SHAREGPT if self.lengths is None else self.lengths, self.seed)
        return Workload(arrivals, lengths, self.requests)
