"""What ``nanoserve simulate`` simulates: policies, the requests that come, the hardware, and how many engines."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.commands.engine_options import parallel_pair, parsed_split
from nanoserve.commands.options import HARDWARE_PANEL, Options, option
from nanoserve.costs import ParallelLayout, StepCosts, load_machine, load_shape
from nanoserve.costs.hardware import GIBI
from nanoserve.costs.predictor import MeasuredPredictor, Predictor, layout_predictors
from nanoserve.costs.profile import MeasuredTimes, read_profile
from nanoserve.errors import UsageError
from nanoserve.measures.workloads import read_arrivals, read_trace
from nanoserve.processes.sizes import parse_size
from nanoserve.simulator import Workload, burst, gamma_arrivals, trace_arrivals, trace_lengths
from nanoserve.simulator.pipeline import COUPLED, DECOUPLED
from nanoserve.simulator.workload import GLLMS_SHAREGPT, named_lengths

_MOST_AT_A_TIME = 2**30  # tokens in a step, and sequences: more than there can be
_MOST_BLOCKS = 2**24  # each takes some 40 bytes here
_MOST_REQUESTS = 10_000_000
_LARGEST_BLOCK = 2**20
RUNTIMES = {"decoupled": DECOUPLED, "coupled": COUPLED}


class StepLimitOptions(Options):
    """How much a step may hold."""

    max_num_batched_tokens: int = option(2048, "Token budget of a step.", minimum=1, maximum=_MOST_AT_A_TIME)
    max_num_seqs: int = option(2048, "Most sequences of an engine.", minimum=1, maximum=_MOST_AT_A_TIME)


class PolicyOptions(
    StepLimitOptions,
    renamed={"--set": "is no more: parameters stand behind a policy's name, as throttling:iterations=4"},
):
    """What decides, and within which limits."""

    policy: str = option(
        "throttling", "Each on its own, as throttling:iterations=4 with parameters.", metavar="NAME,NAME"
    )


class WorkloadOptions(Options):
    """When requests come and how long they are."""

    requests: int = option(1000, "How many.", minimum=1, maximum=_MOST_REQUESTS)
    rate: float | None = option(None, "Requests per second; default: all at once, or as the trace has them.")
    variation: float = option(1.0, "How uneven the gaps are: 1 is Poisson, more comes in bursts (gamma).")
    lengths: str | None = option(None, "IN+OUT tokens, or a name (default: sharegpt-gllm).", metavar="NAME")
    trace: Path | None = option(None, "Lengths and times from a CSV file instead.", metavar="FILE")
    seed: int = option(0, "Seed of arrivals and lengths.", minimum=0)

    @property
    def work_name(self) -> str:
        """Where the requests come from, and when, for the title of a table."""
        lengths = self.trace.name if self.trace else self.lengths or GLLMS_SHAREGPT
        together = "as the trace has them" if self.trace else "all at once"
        return f"{lengths}, {together if self.rate is None else f'{self.rate:g} a second'}"

    def workload(self) -> Workload:
        """The requests; each call makes the same ones. Raises UsageError for options that make no sense."""
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


class HardwareOptions(
    Options, panel=HARDWARE_PANEL, renamed={"--stages": "is now --pp", "--tensor-parallel": "is now --tp"}
):
    """What is simulated: a model on devices in one layout or two, with or without host memory."""

    model: str = option("qwen2.5-32b", "A model's name, or its config.json.", "-m", metavar="MODEL")
    hardware: str = option("gllm-l20", "A machine or device, or a TOML file.", metavar="NAME")
    pp: int = option(4, "Stages of the pipeline.", minimum=1)
    tp: int = option(1, "Devices of a stage.", minimum=1)
    pp_split: str | None = option(None, "Layers of each stage, as 14,14; default: by cost.", metavar="N,N")
    block_size: int = option(16, "Tokens of a KV block.", minimum=1, maximum=_LARGEST_BLOCK)
    num_blocks: int | None = option(
        None, "KV blocks; default: what fits beside the weights.", minimum=1, maximum=_MOST_BLOCKS
    )
    metadata: str = option(
        "decoupled",
        "What stages need to know: sent ahead, as in gLLM, or with the activations.",
        choices=tuple(RUNTIMES),
    )
    profile: Path | None = option(
        None, "Model and machine as nanoserve profile measured them; one stage.", metavar="FILE"
    )
    prefill_parallel: str | None = option(
        None, "Layout for prompts (P4, T2P2), instead of --pp; with --decode-parallel.", metavar="NAME"
    )
    decode_parallel: str | None = option(None, "Layout for decodes (T4), of as many devices.", metavar="NAME")
    host_kv_memory: str | None = option(None, "Host memory for KV blocks, as 80GiB; default: none.", metavar="SIZE")

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """One layout, or that of prompts and that of decodes. Raises UsageError if they do not suit each other."""
        pair = parallel_pair(self.prefill_parallel, self.decode_parallel)
        if pair is None:
            return (ParallelLayout(pipeline_parallel=self.pp, tensor_parallel=self.tp),)
        if self.changed("pp", "tp", "pp_split"):
            raise UsageError("--prefill-parallel and --decode-parallel replace --pp, --tp, --pp-split")
        if any(layout.data_parallel > 1 for layout in pair):
            raise UsageError("data parallel layouts (D) are whole engines of their own: leave the D out")
        prefill, decode = pair
        if prefill.devices != decode.devices:
            raise UsageError(
                f"--prefill-parallel {prefill.name} takes {prefill.devices} devices and "
                f"--decode-parallel {decode.name} {decode.devices}: both run on the same ones"
            )
        return pair

    def changed(self, *names: str) -> bool:
        """Whether any of these is not as it is by default."""
        return any(getattr(self, name) != getattr(type(self), name) for name in names)

    def host_kv_bytes(self) -> int | None:
        """Bytes of host memory that were asked for. Raises UsageError for what is no size, or has no unit."""
        size = self.host_kv_memory
        if size is not None and re.fullmatch(r"[\d.]+", size):
            raise UsageError(f"--host-kv-memory {size:.40} has no unit: say {size:.40}GiB")
        try:
            return None if size is None else parse_size(size)
        except UsageError as error:
            raise UsageError(f"--host-kv-memory: {error}") from None


class FleetOptions(Options, panel="Fleet"):
    """Whole engines, each on all of the hardware that is named, and the router before them."""

    replicas: int = option(1, "Engines, each with its own devices.")
    router: str = option(
        "round-robin",
        "Which engine gets a request: round-robin, or least-tokens (the least outstanding).",
        metavar="NAME",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHardware:
    """What a policy is simulated on: devices by the cost model, or as ``nanoserve profile`` measured them."""

    name: str  # the layout, or the two of them
    layouts: Sequence[StepCosts | MeasuredTimes]  # the times of each parallel layout; it begins with the first
    predictors: Sequence[Predictor]  # one for each layout
    kv_blocks: Sequence[int]  # on the devices of each layout
    host_blocks: int
    facts: Mapping[str, Any] = field(default_factory=dict)  # what a report says of it where the options do not

    @classmethod
    def of(cls, options: HardwareOptions, step_tokens: int) -> "SimulatedHardware":
        """All that the options mean together, in steps of ``step_tokens``. Raises UsageError if they do not fit."""
        if options.profile is not None:
            return cls._measured(options, options.profile)
        split = parsed_split(options.pp_split)
        if split is not None and len(split) != options.pp:
            raise UsageError(f"--pp-split {options.pp_split} names {len(split)} stages, but --pp is {options.pp}")
        shape, machine = load_shape(options.model), load_machine(options.hardware)
        costs = [StepCosts(shape, machine, layout, pipeline_split=split) for layout in options.layouts()]
        first = costs[0].layout
        one_layout = f"{first.pipeline_parallel} stages x {first.tensor_parallel}"
        return cls(
            name=one_layout if len(costs) == 1 else " -> ".join(each.layout.name for each in costs),
            layouts=costs,
            predictors=layout_predictors(costs),
            kv_blocks=[_kv_blocks(options, each, step_tokens) for each in costs],
            host_blocks=_host_blocks(options, costs[0]),
        )

    @classmethod
    def _measured(cls, options: HardwareOptions, path: Path) -> "SimulatedHardware":
        """One layout of one stage, by the profile in a file; it has as many blocks as the measured engine had."""
        if options.changed("prefill_parallel", "decode_parallel"):
            raise UsageError("--profile has one layout: leave --prefill-parallel and --decode-parallel out")
        if options.changed("model", "hardware", "pp", "tp", "pp_split", "metadata"):
            raise UsageError("--profile brings model and machine, and has one stage: leave the options for these out")
        times = MeasuredTimes(read_profile(path))
        model, device = times.profile.settings["model"], times.profile.device.name
        return cls(
            name="as measured",
            layouts=[times],
            predictors=[MeasuredPredictor(times.profile)],
            kv_blocks=[_countable(options.num_blocks or times.memory.kv_blocks(options.block_size))],
            host_blocks=_host_blocks(options, times.profile.step_costs()),
            facts={"model": model, "hardware": device, "stages": 1, "tensor_parallel": 1},
        )


def _kv_blocks(options: HardwareOptions, costs: StepCosts, step_tokens: int) -> int:
    """The blocks that were asked for, or as many as fit beside the weights and a step."""
    fitting = costs.memory.kv_blocks(options.block_size, step_tokens)
    if options.num_blocks is None:
        return _countable(fitting)
    if options.num_blocks > fitting:
        raise UsageError(
            f"--num-blocks {options.num_blocks}: only {fitting} blocks of {options.block_size} tokens fit beside the "
            f"weights in layout {costs.layout.name}; ask for fewer, or for more devices"
        )
    return options.num_blocks


def _countable(blocks: int) -> int:
    if blocks > _MOST_BLOCKS:
        raise UsageError(f"{blocks:,d} KV blocks fit, more than can be simulated: give --num-blocks")
    return blocks


def _host_blocks(options: HardwareOptions, costs: StepCosts) -> int:
    wanted, machine = options.host_kv_bytes(), costs.machine
    if wanted is None:
        return 0
    flag = f"--host-kv-memory {options.host_kv_memory}"
    if 0 < machine.host_memory_bytes < wanted:
        has = f"the {machine.host_memory_bytes / GIBI:g} GiB that a node of {machine.name} has"
        raise UsageError(f"{flag} is more than {has}")
    blocks = costs.memory.host_kv_blocks(wanted, options.block_size)
    if not blocks:
        raise UsageError(f"{flag} does not hold one block of {options.block_size} tokens")
    if blocks > _MOST_BLOCKS:
        held = f"more than {_MOST_BLOCKS} blocks of {options.block_size} tokens"
        raise UsageError(f"{flag} holds {held}: give less, or a larger --block-size")
    return blocks
