"""``nanoserve simulate``: policies, requests and engines on hardware that nobody here has."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nanoserve.commands.engine_options import parallel_pair, parsed_split, quantization_option
from nanoserve.commands.options import HARDWARE_PANEL, Options, file_option, flag_of, option
from nanoserve.commands.tables import columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.costs.hardware import GIBI, load_machine
from nanoserve.costs.predictor import MeasuredPredictor, layout_predictors
from nanoserve.costs.profile import MeasuredTimes, Profile, read_profile
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.serving.requests import stretched_arrivals
from nanoserve.lab.charts import AnyPanel, Chart, ChartCurve, Panel, draw
from nanoserve.lab.commands.bench_options import RESULTS_PANEL, ResultOptions
from nanoserve.lab.highest_rate import HighestRate, RateTrial, TimedAnswer
from nanoserve.lab.simulator import Workload, burst, gamma_arrivals, simulate
from nanoserve.lab.simulator.executor import SimulatedDrafter
from nanoserve.lab.simulator.fleet import check_replicas, make_router
from nanoserve.lab.simulator.pipeline import COUPLED, DECOUPLED
from nanoserve.lab.simulator.result import SimulationResult
from nanoserve.lab.simulator.workload import GLLMS_SHAREGPT, named_lengths
from nanoserve.lab.step_window import StepWindow, token_panels
from nanoserve.lab.workloads import read_arrivals, read_trace
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import find_shape
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.events import Observer
from nanoserve.record.metrics import Distribution, Slo, parse_slo
from nanoserve.record.metrics_observer import FILLING_SHARE, CompletedRequest
from nanoserve.record.trace import RunTrace
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies import parse_policies
from nanoserve.scheduler.predictor import Predictor
from nanoserve.utils.sizes import parse_size

_MOST_AT_A_TIME = 2**30  # tokens in a step, and sequences: more than there can be
_MOST_BLOCKS = 2**24  # each takes some 40 bytes here
_PANEL_SIZE, _TIER_STYLES = (7.5, 2.7), ("-", "--", ":")  # of the chart
_RUNTIMES = {"decoupled": DECOUPLED, "coupled": COUPLED}
_AT_ONCE = 1e9  # requests per second
_LONGEST_TRIAL = 16  # times --requests, for a rate of --max-rate that shorter runs do not decide
_TRIAL_KEYS = ("policy", "rate", "requests")  # identify a trial of --max-rate
_COLUMNS = columns(
    ("", "policy", "rate"),
    (",d", "requests"),
    (",.0f", ("tok/s", "tokens_per_second")),
    (",.2f", ("req/s", "requests_per_second")),
    (",.0f", ("TTFT ms", "ttft_ms.mean"), ("p99", "ttft_ms.p99")),
    (",.1f", ("TPOT ms", "tpot_ms.mean")),
    (",.0f", ("ITL p99", "itl_ms.p99")),
    (",.1f", ("E2EL s", "e2el_s")),
    (".0%", ("KV peak", "kv_peak")),
)
_SLO_COLUMNS = columns((".1%", ("SLO", "slo_attainment")), (",.2f", "goodput"))
_RATIO_COLUMNS = [
    replace(column, format=".2f")
    for column in _COLUMNS
    if column.path not in (*_TRIAL_KEYS, "kv_peak")
]
_TIER_COLUMNS = columns(  # shown if anything happened there
    (",d", ("preempted", "preemptions")),
    (",d", ("drafted", "draft_tokens")),
    (".0%", ("right", "accepted_share")),
    (",d", "transitions"),
    (",.1f", ("take s", "transition_seconds")),
    (",d", ("tokens out", "swapped_out_tokens"), ("tokens in", "swapped_in_tokens")),
    (".0%", ("host mean", "host_occupancy")),
    (",d", "host_tokens"),
    (".0%", ("CPU", "processor_share")),
)
_SPREAD_COLUMNS = columns(
    ("", "policy", "requests", "output_tokens", ("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms")),
    ("", ("bubbles", "bubble_share"), ("KV mean", "kv_occupancy"), ("until s", "seconds")),
)


class StepLimitOptions(Options):
    max_num_batched_tokens: int = option(
        2048, "Token budget of a step.", minimum=1, maximum=_MOST_AT_A_TIME
    )
    max_num_seqs: int = option(
        2048, "Most sequences of an engine.", minimum=1, maximum=_MOST_AT_A_TIME
    )


class PolicyOptions(StepLimitOptions):
    policy: str = option(
        "throttling",
        "Each on its own, as throttling:iterations=4 with parameters.",
        metavar="NAME,NAME",
    )


class WorkloadOptions(Options):
    requests: int = option(1000, "How many.", minimum=1, maximum=10_000_000)
    rate: float | None = option(
        None, "Requests per second; default: all at once, or as the trace has them."
    )
    variation: float = option(
        1.0, "How uneven the gaps are: 1 is Poisson, more comes in bursts (gamma)."
    )
    lengths: str | None = option(
        None, "IN+OUT tokens, or a name (default: sharegpt-gllm).", metavar="NAME"
    )
    trace: Path | None = file_option("Lengths and times from a CSV file instead.")
    seed: int = option(0, "Seed of arrivals and lengths.", minimum=0)

    def workload(self, *, exact: bool = False) -> Workload:
        """The requests; each call makes the same ones. Raises UsageError for options that make no
        sense.

        ``exact`` stretches the arrivals so that their mean rate is the one asked for, and not only
        close to it.
        """
        if self.trace is not None and self.lengths is not None:
            raise UsageError("give --lengths or --trace, not both")
        if self.rate is None and self.variation != 1:
            raise UsageError("--variation is of the gaps that --rate makes: give both")
        arrivals: Iterator[float] | None = None
        if self.rate is not None:
            arrivals = gamma_arrivals(self.rate, self.variation, self.seed)
            if exact:
                arrivals = iter(
                    stretched_arrivals(list(islice(arrivals, self.requests)), self.rate)
                )
        if self.trace is None:
            name = GLLMS_SHAREGPT
            if self.lengths is not None:
                name = self.lengths
            lengths = named_lengths(name, self.seed)
            return Workload(arrivals or burst(), lengths, self.requests)
        if arrivals is None:
            times = read_arrivals(self.trace, self.requests, in_order=True)
            arrivals = (time - times[0] for time in times)
        return Workload(arrivals, cycle(read_trace(self.trace, self.requests)), self.requests)


class HardwareOptions(Options, panel=HARDWARE_PANEL):
    """The hardware to simulate: a model on devices in one layout or two, with or without host
    memory."""

    model: str = option(
        "qwen2.5-32b", "A model's name, config.json or .gguf file.", "-m", metavar="MODEL"
    )
    quantization: str | None = quantization_option(panel=HARDWARE_PANEL)
    hardware: str = option("gllm-l20", "A machine or device, or a TOML file.", metavar="NAME")
    pp: int = option(4, "Stages of the pipeline.", minimum=1)
    tp: int = option(1, "Devices of a stage.", minimum=1)
    pp_split: str | None = option(
        None, "Layers of each stage, as 14,14; default: by cost.", metavar="N,N"
    )
    block_size: int = option(16, "Tokens of a KV block.", minimum=1, maximum=2**20)
    num_blocks: int | None = option(
        None, "KV blocks; default: what fits beside the weights.", minimum=1, maximum=_MOST_BLOCKS
    )
    metadata: str = option(
        "decoupled",
        "Whether a step's metadata is sent ahead, as in gLLM, or with the activations.",
        choices=tuple(_RUNTIMES),
    )
    profile: Path | None = file_option(
        "Model and machine as nanoserve profile measured them; one stage."
    )
    prefill_parallel: str | None = option(
        None,
        "Layout for prompts (P4, T2P2), instead of --pp; with --decode-parallel.",
        metavar="NAME",
    )
    decode_parallel: str | None = option(
        None, "Layout for decodes (T4), of as many devices.", metavar="NAME"
    )
    host_kv_memory: str | None = option(
        None, "Host memory for KV blocks, as 80GiB; default: none.", metavar="SIZE"
    )

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """One layout, or that of prompts and that of decodes. Raises UsageError if they do not suit
        each other."""
        pair = parallel_pair(self.prefill_parallel, self.decode_parallel)
        if pair is None:
            return (ParallelLayout(pipeline_parallel=self.pp, tensor_parallel=self.tp),)
        if self.changed("pp", "tp", "pp_split"):
            raise UsageError(
                "--prefill-parallel and --decode-parallel replace --pp, --tp, --pp-split"
            )
        prefill, decode = pair
        if max(prefill.data_parallel, decode.data_parallel) > 1:
            raise UsageError(
                "data parallel layouts (D) are whole engines of their own: leave the D out"
            )
        if prefill.devices != decode.devices:
            first = f"--prefill-parallel {prefill.name} takes {prefill.devices} devices"
            second = f"--decode-parallel {decode.name} {decode.devices}"
            raise UsageError(f"{first} and {second}: both run on the same ones")
        return pair

    def changed(self, *names: str) -> bool:
        return any(getattr(self, name) != getattr(type(self), name) for name in names)

    @property
    def host_kv_bytes(self) -> int | None:
        """Bytes of host memory that were asked for. Raises UsageError for what is no size, or has
        no unit."""
        size = self.host_kv_memory
        if size is None:
            return None
        if re.fullmatch(r"[\d.]+", size):
            raise UsageError(f"--host-kv-memory {size:.40} has no unit: say {size:.40}GiB")
        try:
            return parse_size(size)
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


class SimulatedHardware(NamedTuple):
    """Hardware that policies are simulated on: devices by the cost model, or as ``nanoserve
    profile`` measured them."""

    name: str  # the layout, or the two of them
    layouts: Sequence[StepCosts | MeasuredTimes]  # the step times of each parallel layout
    predictors: Sequence[Predictor]
    kv_blocks: Sequence[int]  # on the devices of each layout
    host_blocks: int
    windows: tuple[int, ...]  # of the cache groups, whose blocks these are
    max_num_seqs: int  # sequences at a time: no more than have a place for their states
    facts: Mapping[str, Any] = {}  # what a report says of it where the options do not

    @classmethod
    def of(
        cls, options: HardwareOptions, step_tokens: int, max_num_seqs: int
    ) -> "SimulatedHardware":
        """All that the options mean together, in steps of ``step_tokens``. Raises UsageError if
        they do not fit."""
        if options.profile is not None:
            return cls._measured(options, options.profile, max_num_seqs)
        split, machine = parsed_split(options.pp_split), load_machine(options.hardware)
        shape = find_shape(options.model, options.quantization)
        costs = [
            StepCosts(shape, machine, layout, pipeline_split=split) for layout in options.layouts()
        ]
        name = f"--pp {options.pp} --tp {options.tp}"
        if len(costs) > 1:
            name = " -> ".join(one.layout.name for one in costs)
        states, facts = 0, dict[str, Any]()
        if shape.recurrent is not None:
            _check_one_tier(options)
            states = max_num_seqs = costs[0].memory.states(max_num_seqs, step_tokens)
            facts["states"] = states
        blocks = [_kv_blocks(options, each, step_tokens, states) for each in costs]
        host_blocks, windows = _host_blocks(options, costs[0]), costs[0].counts.groups.windows
        predictors = layout_predictors(costs)
        return cls(name, costs, predictors, blocks, host_blocks, windows, max_num_seqs, facts)

    @classmethod
    def _measured(
        cls, options: HardwareOptions, path: Path, max_num_seqs: int
    ) -> "SimulatedHardware":
        """One layout of one stage, by the profile in a file; it has as many blocks as the measured
        engine had."""
        if options.changed("prefill_parallel", "decode_parallel"):
            raise UsageError(
                "--profile has one layout: leave --prefill-parallel and --decode-parallel out"
            )
        if options.changed("model", "quantization", "hardware", "pp", "tp", "pp_split", "metadata"):
            raise UsageError(
                "--profile brings model and machine, and has one stage: leave the options for "
                "these out"
            )
        profile = read_profile(path, Profile)
        times = MeasuredTimes(profile)
        blocks = _countable(options.num_blocks or times.memory.kv_blocks(options.block_size))
        host_blocks = _host_blocks(options, profile.step_costs())
        facts = {
            "model": profile.settings["model"],
            "hardware": profile.device.name,
            "stages": 1,
            "tensor_parallel": 1,
        }
        predictors, windows = [MeasuredPredictor(profile)], profile.model.cache_groups.windows
        return cls(
            "as measured", [times], predictors, [blocks], host_blocks, windows, max_num_seqs, facts
        )


def _check_one_tier(options: HardwareOptions) -> None:
    """Raises UsageError for options that move keys and values of a model with recurrent states."""
    for name in ("host_kv_memory", "prefill_parallel"):
        if options.changed(name):
            raise UsageError(
                f"{flag_of(name)}: the recurrent states of {options.model} stay on their devices; "
                "leave it out"
            )


def _kv_blocks(options: HardwareOptions, costs: StepCosts, step_tokens: int, states: int) -> int:
    """The blocks that were asked for, or as many as fit beside the weights, a step and the
    states."""
    fitting = costs.memory.kv_blocks(options.block_size, step_tokens, states)
    if options.num_blocks is None:
        return _countable(fitting)
    if options.num_blocks > fitting:
        fit = f"only {fitting} blocks of {options.block_size} tokens fit beside the weights"
        if states:
            fit += f" and {states} states"
        advice = "ask for fewer, or for more devices"
        raise UsageError(
            f"--num-blocks {options.num_blocks}: {fit} in layout {costs.layout.name}; {advice}"
        )
    return options.num_blocks


def _countable(blocks: int) -> int:
    if blocks > _MOST_BLOCKS:
        raise UsageError(
            f"{blocks:,d} KV blocks fit, more than can be simulated: give --num-blocks"
        )
    return blocks


def _host_blocks(options: HardwareOptions, costs: StepCosts) -> int:
    wanted, machine, flag = (
        options.host_kv_bytes,
        costs.machine,
        f"--host-kv-memory {options.host_kv_memory}",
    )
    if wanted is None:
        return 0
    if 0 < machine.host_memory_bytes < wanted:
        gibibytes = f"{machine.host_memory_bytes / GIBI:g} GiB"
        raise UsageError(f"{flag} is more than the {gibibytes} that a node of {machine.name} has")
    blocks = costs.memory.host_kv_blocks(wanted, options.block_size)
    if not blocks:
        raise UsageError(f"{flag} does not hold one block of {options.block_size} tokens")
    if blocks > _MOST_BLOCKS:
        held = f"more than {_MOST_BLOCKS} blocks of {options.block_size} tokens"
        raise UsageError(f"{flag} holds {held}: give less, or a larger --block-size")
    return blocks


class SimulateOptions(PolicyOptions, WorkloadOptions, HardwareOptions, FleetOptions, ResultOptions):
    slo: str | None = option(
        None,
        "Milliseconds that a good answer keeps to, as ttft=2000,tpot=100,e2el=9000.",
        metavar="LIMITS",
    )
    speculate: str | None = option(
        None,
        "A drafter: how often the first, second, ... draft token of a row is right if those before "
        "are, and what a "
        "draft token costs, over a step; as 0.8,0.7,0.6:0.05.",
        metavar="RATES[:COST]",
    )
    max_rate: bool = option(
        False,
        "Find the highest rate at which no queue grows, and with --slo 99% of the requests keep to "
        "it.",
    )
    record: Path | None = file_option(
        "Write the stages' time for Perfetto or chrome://tracing; one policy only.",
        panel=RESULTS_PANEL,
    )


def run(options: SimulateOptions) -> None:
    """Neither the hardware nor the model is needed: steps take as long as the cost model says
    (docs/costs.md).

    [bold]Examples[/bold]

      nanoserve simulate --policy sarathi,throttling,adaptive --rate 4
      nanoserve simulate -m qwen2.5-14b --lengths azure-conv --rate 2 \\
        --record stages.json
      nanoserve simulate --policy throttling,throttling:iterations=4:threshold=0.1
      nanoserve simulate --rate 40 --requests 5000 --replicas 16 \\
        --router least-tokens --slo ttft=2000,tpot=100
      nanoserve simulate --policy sarathi,throttling --max-rate
      nanoserve simulate --policy seesaw --prefill-parallel P4 \\
        --decode-parallel T4 --host-kv-memory 80GiB
      nanoserve simulate --policy sarathi,throttling --speculate 0.8,0.7
    """
    chosen = parse_policies(options.policy, options.max_num_batched_tokens)
    _check_together(options, len(chosen))
    slo = parse_slo(options.slo)
    drafter = SimulatedDrafter.parse(options.speculate) if options.speculate else None
    hardware = SimulatedHardware.of(options, options.max_num_batched_tokens, options.max_num_seqs)
    if drafter is not None and "states" in hardware.facts:
        raise UsageError(
            f"--speculate: draft tokens cannot be taken back from the recurrent states of "
            f"{options.model}; leave it out"
        )
    settings = _settings(options, hardware)
    settings |= {"slo_ms": msgspec.to_builtins(slo), "speculate": options.speculate}
    place = _place(settings, hardware)
    reported = options.reported(
        "simulate", settings, lambda report, options: _show(report, options, place)
    )
    # All devices of a simulated stage are one worker, named by its stage if there is one layout.
    layouts = options.layouts() if len(hardware.layouts) > 1 else (ParallelLayout(),)
    with reported as report, ExitStack() as opened:
        trace: ChromeTraceFile | None = None
        if options.record:
            trace = opened.enter_context(ChromeTraceFile(options.record))
        runs: list[PlottedRun] = []
        highest: dict[str, Any] = {}
        first: StepWindow | None = None
        for name, policy in chosen.items():
            run_policy = _prepared(policy, options, hardware, slo, drafter)
            if options.max_rate:
                trial = partial(_try, run_policy, name, options, report)
                search = HighestRate(trial, options.requests, _LONGEST_TRIAL * options.requests)
                highest[name] = search.find()
                report.put("highest_rates", highest)
                continue
            window = StepWindow(beside=first)
            first = first or window
            observers: list[Observer] = [window]
            if trace is not None:
                observers.append(RunTrace(trace, 0.0, layouts=layouts))
            result = run_policy(requests=options.workload(), observers=observers)
            report.add(
                {"policy": name, "bubble_share": result.bubble_share, **msgspec.to_builtins(result)}
            )
            runs.append(PlottedRun(name, result, window))
        if options.plot is not None:
            title = f"{place}\n{_title(report, options)}"
            draw(simulation_chart(title, runs), options.plot, panel_size=_PANEL_SIZE)


def _check_together(options: SimulateOptions, policies: int) -> None:
    """Raises UsageError for options that do not go together, and for a fleet that cannot be, before
    anything runs."""
    if options.record is not None and policies > 1:
        raise UsageError("--record takes one policy")
    if options.max_rate and (options.rate, options.plot, options.record) != (None, None, None):
        raise UsageError("--max-rate tries many rates: leave out --rate, --plot and --record")
    check_replicas(options.replicas)
    make_router(options.router)


def _prepared(
    policy: Policy,
    options: SimulateOptions,
    hardware: SimulatedHardware,
    slo: Slo | None,
    drafter: SimulatedDrafter | None,
) -> Callable[..., SimulationResult]:
    """Everything that a simulation of this policy needs but its requests and observers."""
    return partial(
        simulate,
        policy,
        hardware.layouts[0],
        num_blocks=hardware.kv_blocks[0],
        block_size=options.block_size,
        windows=hardware.windows,
        max_num_seqs=hardware.max_num_seqs,
        runtime=_RUNTIMES[options.metadata],
        slo=slo,
        replicas=options.replicas,
        router=options.router,
        host_blocks=hardware.host_blocks,
        other_layouts=list(zip(hardware.layouts[1:], hardware.kv_blocks[1:], strict=True)),
        predictors=hardware.predictors,
        drafter=drafter,
    )


def _try(
    run_policy: Callable[..., SimulationResult],
    name: str,
    options: SimulateOptions,
    report: Report,
    rate: float,
    requests: int,
) -> RateTrial:
    tried = min(rate, _AT_ONCE)
    at = replace(options, rate=tried, requests=requests)
    remark(f"simulating {name}: {requests} requests, {_pace(tried)} ...")
    answers: list[TimedAnswer] = []

    def keep(request: CompletedRequest) -> None:
        answers.append(
            TimedAnswer(request.arrival, request.ttft, request.tpot, request.output_tokens)
        )

    result = run_policy(requests=at.workload(exact=True), request_observers=[keep])
    row = {"policy": name, "rate": tried, "bubble_share": result.bubble_share}
    report.add(row | msgspec.to_builtins(result))
    return RateTrial(result.requests_per_second, answers, result.slo_attainment)


def _settings(options: SimulateOptions, hardware: SimulatedHardware) -> dict[str, Any]:
    groups = (HardwareOptions, WorkloadOptions, FleetOptions)
    names = [
        declared.name
        for group in groups
        for declared in fields(group)
        if declared.name not in ("pp", "tp")
    ]
    return {
        **msgspec.to_builtins({name: getattr(options, name) for name in names}, enc_hook=str),
        "host_kv_memory": options.host_kv_bytes and options.host_kv_bytes / GIBI,
        "stages": options.pp,
        "tensor_parallel": options.tp,
        **hardware.facts,
        "kv_blocks": hardware.kv_blocks[0],
        "kv_blocks_of_layouts": hardware.kv_blocks,
        "host_blocks": hardware.host_blocks,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": options.max_num_seqs,
    }


def _place(settings: Mapping[str, Any], hardware: SimulatedHardware) -> str:
    blocks = " -> ".join(f"{number:,d}" for number in hardware.kv_blocks) + " KV blocks"
    model = " in ".join(filter(None, (settings["model"], settings["quantization"])))
    place = (
        f"{model} on {settings['hardware']}, {hardware.name}, {settings['metadata']} metadata, "
        f"{blocks}"
    )
    if hardware.host_blocks:
        place += f", {hardware.host_blocks:,d} in host memory"
    if "states" in settings:
        place += f", states of {settings['states']:,d} sequences"
    if settings["replicas"] > 1:
        place += f", {settings['replicas']} replicas ({settings['router']})"
    return place


def _title(report: Report, options: SimulateOptions) -> str:
    """Describe the requests that ran; a trace may have fewer requests than were asked for."""
    lengths, pace = options.lengths or GLLMS_SHAREGPT, "all at once"
    if options.trace:
        lengths, pace = options.trace.name, "as the trace has them"
    if options.max_rate:
        pace = "at many rates; more where these do not decide"
    elif options.rate is not None:
        pace = f"{options.rate:g} a second"
    return f"{report.rows[0]['requests']} requests of {lengths}, {pace}"


def _pace(rate: float) -> str:
    return "all at once" if rate == _AT_ONCE else f"{rate:.3g} a second"


def _show(report: Report, options: SimulateOptions, place: str) -> None:
    print(f"simulated: {place}")
    rows = [_shown(row) for row in report.rows]
    tiers = [column for column in _TIER_COLUMNS if any(row[column.path] for row in rows)]
    keys = _TRIAL_KEYS if options.max_rate else ("policy",)
    shown = [column for column in _COLUMNS if column.path in keys or column.path not in _TRIAL_KEYS]
    if report.document["settings"]["slo_ms"]:
        shown += _SLO_COLUMNS
    print_table(_title(report, options), shown + tiers, rows, keys=len(keys))
    if len(rows) > 1 and not options.max_rate:
        first, *others = rows
        ratios = [_ratios(row, first) for row in others]
        print_table(f"over {first['policy']}", _COLUMNS[:1] + _RATIO_COLUMNS, ratios)
    if (steady := report.rows[-1]["steady"]) is not None:
        filling = f"{FILLING_SHARE:.0%} of the" if options.max_rate else steady["arrivals_before"]
        print(f"rates per second: without the first {filling} arrivals and all after the last one")
    for name, found in report.document.get("highest_rates", {}).items():
        print(f"{name}: {found['words']}")
    if options.replicas > 1:
        print_table(
            "least / mean / most of the replicas", _SPREAD_COLUMNS, map(_spread, report.rows)
        )


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table: rates without filling and draining, but of the whole run if all requests
    came at once."""
    shown = {**row, "e2el_s": row["e2el_ms"]["mean"] / 1000}
    if row.get("rate") == _AT_ONCE:
        return {**shown, "rate": "burst"}
    if "rate" in row:
        shown["rate"] = f"{row['rate']:.3g}"
    return shown | (row["steady"] or {})


def _ratios(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one policy over the first policy's, under the same paths; none over
    nothing."""
    found: dict[str, Any] = {"policy": row["policy"]}
    for column in _RATIO_COLUMNS:
        value, base = column.value(row), column.value(first)
        place = found
        *parents, name = column.path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = None
        if value is not None and base:
            place[name] = value / base
    return found


def _spread(row: Mapping[str, Any]) -> dict[str, str | None]:
    spread: dict[str, str | None] = {"policy": row["policy"]}
    for column in _SPREAD_COLUMNS[1:]:
        if (
            found := Distribution.of(replica[column.path] for replica in row["replicas"])
        ) is not None:
            shown = ",.0f"
            if found.max < 10:
                shown = ".2f"
            spread[column.path] = (
                f"{found.min:{shown}} / {found.mean:{shown}} / {found.max:{shown}}"
            )
    return spread


@dataclass(frozen=True, slots=True)
class PlottedRun:
    policy: str
    result: SimulationResult
    window: StepWindow


def simulation_chart(title: str, runs: Sequence[PlottedRun]) -> Chart:
    """A row for each policy: stages over time, and tokens of each step (gLLM, figure 1). Below
    them, one panel compares their KV caches (Seesaw, figure 6)."""
    counts = [[counts for _, *counts in run.result.tokens_series] for run in runs]
    tokens = token_panels([f"{run.policy}: tokens of each step" for run in runs], "step", counts)
    panels: list[AnyPanel] = []
    curves = []
    for number, (run, panel) in enumerate(zip(runs, tokens, strict=True)):
        idle = f"stages idle for {run.result.bubble_share:.0%} of the whole run"
        panels += [run.window.gantt(f"{run.policy}: which step is where; {idle}"), panel]
        tiers = run.result.occupancies
        for (tier, points), style in zip(tiers.items(), _TIER_STYLES, strict=False):
            times, shares = zip(*points, strict=True)
            label = run.policy
            if len(tiers) > 1:
                label = f"{run.policy}, {tier}"
            curves.append(
                ChartCurve(
                    label, times, [100 * share for share in shares], style=f"C{number % 10}{style}"
                )
            )
    kv = Panel(
        title="KV cache in use", x="time, s", y="% of the blocks", curves=curves, kind="step"
    )
    panels.append(kv)
    return Chart(title, panels, columns=2)
