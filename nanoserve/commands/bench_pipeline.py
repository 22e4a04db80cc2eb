"""``nanoserve bench pipeline``: scheduling policies side by side on the same worker processes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.floors import ModelCost
from nanoserve.benchmarks.pipeline.picture import plot_runs
from nanoserve.benchmarks.pipeline.policies import PipelineScheduling
from nanoserve.benchmarks.pipeline.rounds import RATIOS, PipelineBench, PipelineRound, PipelineVariant, pairs
from nanoserve.benchmarks.policy_names import parse_policies
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.serving.requests import Work, parse_rates, poisson_arrivals
from nanoserve.benchmarks.tables import print_table
from nanoserve.benchmarks.variants import KeptRun, KeptRuns, Ratio
from nanoserve.commands.bench_options import (
    WORK_PANEL,
    LengthOptions,
    ResultOptions,
    fitting_work,
    kept,
    operators_title,
    settled_operators,
)
from nanoserve.commands.bench_variants import (
    RandomModelOptions,
    RoundsOptions,
    columns,
    engine_facts,
    measure_rounds,
    opened_engine,
    opened_record,
    put_summary,
    ratio_text,
    requests_maker,
    resolved_model,
    rounds_of,
)
from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.config import ModelConfig
from nanoserve.engine_config import MOST_PARALLEL, PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.models.hub import ResolvedModel
from nanoserve.runtime.launch.torchrun import TorchrunProcess

if TYPE_CHECKING:
    from nanoserve.benchmarks.pipeline.engines import Metadata, OpenEngine

METADATA: "dict[str, tuple[Metadata, ...]]" = {
    "decoupled": ("decoupled",),
    "coupled": ("coupled",),
    "both": ("decoupled", "coupled"),
}
_RATIO_NAMES = {"output_tokens_per_s": "tok/s", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2EL"}
_KEYS = (("policy, engine", "variant"), ("read", "state"))
_REQUEST_COLUMNS = columns(
    *_KEYS,
    ("rounds", "rounds"),
    ("seconds", "seconds", ",.2f"),
    ("output tok/s", "output_tokens_per_s", ",.1f"),
    ("total tok/s", "total_tokens_per_s", ",.1f"),
    ("TTFT ms", "ttft_ms.mean", ",.1f"),
    ("TTFT p99", "ttft_ms.p99", ",.1f"),
    ("TPOT ms", "tpot_ms.mean", ",.1f"),
    ("TPOT p99", "tpot_ms.p99", ",.1f"),
    ("E2EL ms", "e2el_ms.mean", ",.1f"),
    ("E2EL p99", "e2el_ms.p99", ",.1f"),
    ("preempted", "preemptions", ",.0f"),
    ("floor s", "floor_seconds", ",.2f"),
    ("engine ms", "engine_ms", ".3f"),
    ("engine share", "engine_share", ".1%"),
    ("foreign cores", "foreign_cores", ".2f"),
)
_STAGE_COLUMNS = columns(
    *_KEYS,
    ("stage", "stage"),
    ("micro-batches", "steps", ",.0f"),
    ("tokens", "tokens.mean", ",.1f"),
    ("variation", "variation", ".2f"),
    ("prompt tokens", "prompt_tokens.mean", ",.1f"),
    ("decodes", "decodes.mean", ",.1f"),
    ("bubbles", "bubbles", ".1%"),
    ("sending", "sending", ".1%"),
    ("for inputs", "metadata", ".1%"),
    ("for work", "waiting", ".1%"),
    ("inputs of step", "metadata_of_step", ".2%"),
)
_RATIO_COLUMNS = columns(
    ("variants", "variants"), ("read", "state"), ("rounds", "rounds"), *((name, name) for name in _RATIO_NAMES.values())
)
_SIMULATED_COLUMNS = columns(
    *_KEYS,
    ("makespan", "simulated.makespan", ".3f"),
    ("TTFT", "simulated.ttft", ".3f"),
    ("TPOT", "simulated.tpot", ".3f"),
    ("plans", "simulated.plans", ",.0f"),
    ("replayed", "simulated.replayed", ",.0f"),
    ("others when simulated", "simulated.others", ",.0f"),
)


class PipelineOptions(
    LengthOptions,
    RoundsOptions,
    RandomModelOptions,
    ResultOptions,
    panel=WORK_PANEL,
    renamed={"--request-rate": "is now --rate"},
):
    """All options of the command: requests, and workers that several policies run on in turn."""

    rate: str = option("inf", "Requests per second, or inf: all at once.", metavar="X")
    metadata: str = option("decoupled", "decoupled: plans go ahead (gLLM); coupled; or both.", metavar="NAME")
    against_one_process: bool = option(False, "Also one process with all threads, on the same work.")
    policy: str = option(
        "sarathi,throttling",
        "Each on its own, as throttling:without_wt with parameters.",
        metavar="NAME,NAME",
        variables=(),
    )
    pp: int = option(2, "Stages of the pipeline.", minimum=1, maximum=MOST_PARALLEL, variables=())

    def config(self) -> EngineConfig:
        """How the workers run; policies are for each run's own scheduler.

        Raises:
            UsageError: for a setting out of range, and for what only one policy of these can use.
        """
        if self.prefill_parallel or self.decode_parallel or self.host_kv_memory or self.dp > 1:
            raise UsageError(
                "policies are compared on one layout of one engine, without host memory: leave out --dp, "
                f"{PAIR_OPTIONS[0]}, {PAIR_OPTIONS[1]} and --host-kv-memory"
            )
        return EngineConfig(**{**WorkersOptions.settings(self), "policy": None, "trace": None})

    def requests_per_second(self) -> float:
        """The one rate.

        Raises:
            UsageError: for what is none, or several.
        """
        rates = parse_rates(self.rate, "--rate")
        if len(rates) > 1:
            raise UsageError(f"--rate takes one rate here, not {self.rate!r:.40}")
        return rates[0]

    def metadatas(self) -> "tuple[Metadata, ...]":
        """Ways of telling stages of plans.

        Raises:
            UsageError: for an unknown way, or both where there are workers for one.
        """
        if self.metadata not in METADATA:
            raise UsageError(f"--metadata {self.metadata!r:.40} is not one of {', '.join(METADATA)}")
        if self.metadata == "both" and TorchrunProcess.from_environment() is not None:
            raise UsageError("--metadata both takes two groups of workers, but torchrun started one: measure each")
        return METADATA[self.metadata]


@on_all_machines
def run(options: PipelineOptions) -> int:
    """Printed are tokens per second and latencies, where the stages' time went (bubbles), how even the micro-batches
    were, ratios with their spread, and what the simulator makes of the same stage times. Answers have the length
    that was asked for, prompts are random, no prefixes are shared.

    [bold]Examples[/bold]

      nanoserve bench pipeline --pp 2 -m dummy:smollm2-135m --rate 2 \\
        --plot pipeline.png
      nanoserve bench pipeline --policy throttling --metadata both \\
        --json metadata.json
      nanoserve bench pipeline --policy sarathi --against-one-process --rounds 5
    """
    options.check_is_for_cpu()
    config, metadatas, rate = options.config(), options.metadatas(), options.requests_per_second()
    policies = tuple(parse_policies(options.policy, options.max_num_batched_tokens))
    work = options.read(options.seed or 0)
    report = options.open_report("pipeline", _settings(work, options))
    operators = settled_operators(options.threads)
    with ExitStack() as opened:
        keeper = KeptRuns(opened_record(options, opened))
        opened.enter_context(kept(report, lambda: _show(report, options, keeper)))
        resolved, model = resolved_model(options)
        engines = _open_engines(resolved, config, metadatas, options, opened)
        scheduling, work = _scheduling(engines, config, model, work, report)
        variants = [_variant(engine, policy, scheduling) for engine in engines for policy in policies]
        bench = _bench(variants, work, rate, options.seed or 0, config, model, keeper)
        facts = engine_facts(resolved, config, model, operators, compiled=all(one.compiled for one in engines))
        limits = {"limit_read_gb_per_s": bench.limits.bytes_per_second / 1e9}
        limits |= {"limit_gflops": bench.limits.operations_per_second / 1e9}
        report.put("engine", {**facts, "kv_blocks": min(engine.num_blocks for engine in engines), **limits})
        measure_rounds([(bench, {})], options.rounds, report)
    return EXIT_OK


def _settings(work: Work, options: PipelineOptions) -> dict[str, Any]:
    """What the report says about the options."""
    return {
        "work": work.name,
        "requests": len(work.shapes),
        "request_rate": options.rate,
        "rounds": options.rounds,
        "policies": options.policy,
        "metadata": options.metadata,
        "pp": options.pp,
        "tp": options.tp,
        "pp_split": options.pp_split,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "seed": options.seed or 0,
    }


def _open_engines(
    resolved: ResolvedModel,
    config: EngineConfig,
    metadatas: "Sequence[Metadata]",
    options: PipelineOptions,
    opened: ExitStack,
) -> "list[OpenEngine]":
    """Each once, for all rounds."""
    from nanoserve.benchmarks.pipeline.engines import open_one_process, open_workers, workers_name

    engines = []
    for metadata in metadatas:
        remark(f"starting {workers_name(config, metadata)}")
        engines.append(opened_engine(opened, partial(open_workers, resolved, config, metadata)))
    if options.against_one_process:
        remark("opening one process")
        engines.append(opened_engine(opened, partial(open_one_process, resolved, config)))
    return engines


def _scheduling(
    engines: "Sequence[OpenEngine]", config: EngineConfig, model: ModelConfig, work: Work, report: Report
) -> tuple[PipelineScheduling, Work]:
    """What all schedulers share, and the requests that fit."""
    from nanoserve.benchmarks.pipeline.engines import common_context

    num_blocks, context = common_context(engines, config, model)
    scheduling = PipelineScheduling(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
    )
    return scheduling, fitting_work(work, context, report)


def _variant(engine: "OpenEngine", policy: str, scheduling: PipelineScheduling) -> PipelineVariant:
    return PipelineVariant(
        policy=policy,
        engine=engine.name,
        executor=engine.executor,
        make_scheduler=scheduling.maker(policy, engine.executor),
        workers=engine.workers,
        tensor_parallel=engine.tensor_parallel,
        simulated=engine.simulated,
    )


def _bench(
    variants: Sequence[PipelineVariant],
    work: Work,
    rate: float,
    seed: int,
    config: EngineConfig,
    model: ModelConfig,
    keeper: KeptRuns,
) -> PipelineBench:
    import torch

    from nanoserve.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits
    from nanoserve.models.dtypes import resolve_dtype

    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    remark(f"{STAGE} ...")
    probe = BandwidthProbe()
    with show_progress() as progress:
        limits = machine_limits(dtype, probe, progress=progress)
    number, vocab_size = len(work.shapes), model.vocab_size
    return PipelineBench(
        case=work.name,
        variants=variants,
        make_requests=requests_maker(work.shapes, vocab_size, seed, lambda own: poisson_arrivals(rate, number, own)),
        vocab_size=vocab_size,
        cost=ModelCost(model, dtype.itemsize),
        limits=limits,
        probe=probe.read,
        foreign=ForeignLoad(),
        keep=lambda variant, run: keeper.keep(KeptRun(variant.name, run, variant.layouts)),
    )


def _show(report: Report, options: ResultOptions, keeper: KeptRuns) -> None:
    rounds = rounds_of(report, PipelineRound)
    summary, compared = put_summary(report, rounds, pairs(list(rounds[0].variants)), RATIOS)
    title = _title(report)
    if summary:
        print_table(title, _REQUEST_COLUMNS, summary, keys=2)
        heading = "micro-batches, and what the time of the stages went into"
        print_table(heading, _STAGE_COLUMNS, _stage_rows(summary), keys=3)
    if summary and compared:
        print_table("ratios within a round: median (lowest-highest)", _RATIO_COLUMNS, _ratio_rows(compared), keys=2)
    if simulated := [row for row in summary if row["simulated"]]:
        heading = "simulated, with the stage times of the real runs; ratios are simulated over real"
        print_table(heading, _SIMULATED_COLUMNS, simulated, keys=2)
    if options.plot is not None:
        plot_runs(options.plot, report.titled(f"{title}, last round"), list(keeper.last.values()))


def _title(report: Report) -> str:
    settings, facts = report.document["settings"], report.document["engine"]
    together = "all at once" if settings["request_rate"] == "inf" else f"{settings['request_rate']} a second"
    how = f"{facts['dtype']}, {operators_title(facts)}"
    threads = f"{facts['threads']} threads, {facts['threads_of_a_worker']} of them for each worker"
    return f"{settings['requests']} requests of {settings['work']}, {together}; {facts['model']}, {how}, {threads}"


def _stage_rows(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for each stage; a single process has one without shares."""
    rows: list[dict[str, Any]] = []
    for row in summary:
        for stage, shares in (row["stages"] or {"-": {}}).items():
            bubbles = 1 - shares["computing"] if shares else None
            rows.append({**row, **shares, "stage": stage, "bubbles": bubbles})
    return rows


def _ratio_rows(compared: Sequence[Ratio]) -> list[dict[str, Any]]:
    """One for each pair and state, with all metrics."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in compared:
        row = rows.setdefault((one.variants, one.state), {"variants": one.variants, "state": one.state})
        row["rounds"] = one.rounds
        row[_RATIO_NAMES[one.metric]] = ratio_text(one)
    return list(rows.values())
