"""What ``nanoserve simulate`` is asked for: policies, the requests that come, the hardware, and how many engines."""

from pathlib import Path

from nanoserve.benchmarks.policy_names import parse_policies
from nanoserve.commands.bench_options import WORK_PANEL
from nanoserve.commands.engine_options import parallel_pair, parsed_split
from nanoserve.commands.options import Options, option
from nanoserve.costs import ParallelLayout
from nanoserve.errors import UsageError
from nanoserve.measures.workloads import read_arrivals, read_trace
from nanoserve.scheduler.load import Policy
from nanoserve.simulator import Workload, burst, gamma_arrivals, trace_arrivals, trace_lengths
from nanoserve.simulator.fleet import check_replicas, make_router
from nanoserve.simulator.pipeline import COUPLED, DECOUPLED
from nanoserve.simulator.workload import GLLMS_SHAREGPT, named_lengths

HARDWARE_PANEL = "Hardware"
MOST_AT_A_TIME = 2**30
"""The most tokens in a step, and sequences: more than there can be, and few enough to be counted with."""
MOST_BLOCKS = 2**24
"""Each takes some 40 bytes here."""
_MOST_REQUESTS = 10_000_000
_LARGEST_BLOCK = 2**20
RUNTIMES = {"decoupled": DECOUPLED, "coupled": COUPLED}


class StepLimitOptions(Options, panel=WORK_PANEL):
    """How much a step may hold."""

    max_num_batched_tokens: int = option(2048, "Token budget of a step.", minimum=1, maximum=MOST_AT_A_TIME)
    max_num_seqs: int = option(2048, "Most sequences of an engine.", minimum=1, maximum=MOST_AT_A_TIME)


class PolicyOptions(
    StepLimitOptions,
    panel=WORK_PANEL,
    renamed={"--set": "is no more: parameters stand behind a policy's name, as throttling:iterations=4"},
):
    """What decides, and within which limits."""

    policy: str = option(
        "throttling", "Each on its own, as throttling:iterations=4 with parameters.", metavar="NAME,NAME"
    )

    def policies(self) -> dict[str, Policy]:
        """The named policies, in that order.

        Raises:
            UsageError: for an unknown policy, and for parameters that it does not have or that make no sense.
        """
        return parse_policies(self.policy, self.max_num_batched_tokens)


class WorkloadOptions(Options, panel=WORK_PANEL):
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
        """The requests; each call makes the same ones.

        Raises:
            UsageError: for a rate, a name or a trace that makes no sense.
        """
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
        None, "KV blocks; default: what fits beside the weights.", minimum=1, maximum=MOST_BLOCKS
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

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each stage, where they are given.

        Raises:
            UsageError: if they are not as many as there are stages.
        """
        split = parsed_split(self.pp_split)
        if split is not None and len(split) != self.pp:
            raise UsageError(f"--pp-split {self.pp_split} names {len(split)} stages, but --pp is {self.pp}")
        return split

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """One layout, or that of prompts and that of decodes.

        Raises:
            UsageError: for layouts that do not suit each other.
        """
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


class FleetOptions(Options, panel="Fleet"):
    """Whole engines, each on all of the hardware that is named, and the router before them."""

    replicas: int = option(1, "Engines, each with its own devices.")
    router: str = option(
        "round-robin",
        "Which engine gets a request: round-robin, or least-tokens (the least outstanding).",
        metavar="NAME",
    )

    def check(self) -> None:
        """Refuse an impossible fleet before anything runs.

        Raises:
            UsageError: for a number of engines or a router that there cannot be.
        """
        check_replicas(self.replicas)
        make_router(self.router)
