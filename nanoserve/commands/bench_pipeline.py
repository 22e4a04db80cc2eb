"""``nanoserve bench pipeline``: scheduling policies side by side on the same worker processes."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_lengths import LengthOptions
from nanoserve.commands.bench_options import (
    WORK_PANEL,
    ResultOptions,
    kept,
    settled_operators,
    work_option,
)
from nanoserve.commands.bench_rounds import fitting_work, measure_rounds, resolved_model
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import ENGINE_PANEL, MODEL_PANEL, at_most, option, switch
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.workers_options import WORKERS_PANEL, WorkersOptions
from nanoserve.engine_config import MOST_PARALLEL, PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.runtime.launch.torchrun import TorchrunProcess

if TYPE_CHECKING:
    from nanoserve.benchmarks.pipeline.engines import Metadata, OpenEngine
    from nanoserve.benchmarks.pipeline.policies import Scheduling
    from nanoserve.benchmarks.pipeline.rounds import Bench, Variant
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.serving.work import Work
    from nanoserve.benchmarks.variants import KeptRuns
    from nanoserve.config import ModelConfig
    from nanoserve.models.hub import ResolvedModel
    from nanoserve.request import Request

DEFAULT_MODEL = "dummy:qwen3-0.6b"
METADATA: "dict[str, tuple[Metadata, ...]]" = {
    "decoupled": ("decoupled",),
    "coupled": ("coupled",),
    "both": ("decoupled", "coupled"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions(WorkersOptions):
    """Workers that several policies run on in turn."""

    model: Annotated[
        str | None,
        option("--model", "-m", panel=MODEL_PANEL, help="Directory, hub id or dummy:NAME.", metavar="MODEL"),
    ] = DEFAULT_MODEL
    policy: Annotated[
        str,
        option(
            "--policy",
            panel=ENGINE_PANEL,
            help="Each on its own, as throttling:without_wt with parameters.",
            metavar="NAME,NAME",
            envvar=None,
        ),
    ] = "sarathi,throttling"
    pp: Annotated[
        int,
        option(
            "--pp",
            panel=WORKERS_PANEL,
            help="Stages of the pipeline.",
            min=1,
            callback=at_most(MOST_PARALLEL),
            envvar=None,
        ),
    ] = 2

    def config(self) -> EngineConfig:
        """Of the workers; policies are for each run's own scheduler.

        Raises:
            UsageError: for a setting out of range, and for what only one policy of these can use.
        """
        if self.prefill_parallel or self.decode_parallel or self.host_kv_memory or self.dp > 1:
            raise UsageError(
                "policies are compared on one layout of one engine, without host memory: leave out --dp, "
                f"{PAIR_OPTIONS[0]}, {PAIR_OPTIONS[1]} and --host-kv-memory"
            )
        return EngineConfig(**{**WorkersOptions.settings(self), "policy": None, "trace": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """What is held against what."""

    rounds: Annotated[int, work_option("--rounds", help="Rounds that count.", min=1)] = 3
    request_rate: Annotated[
        str, work_option("--request-rate", help="Requests per second, or inf: all at once.", metavar="X")
    ] = "inf"
    metadata: Annotated[
        str,
        work_option("--metadata", help="decoupled: plans go ahead (gLLM); coupled; or both.", metavar="NAME"),
    ] = "decoupled"
    against_one_process: Annotated[
        bool,
        switch(
            "--against-one-process",
            panel=WORK_PANEL,
            help="Also one process with all threads, on the same work.",
            envvar=None,
        ),
    ] = False

    @property
    def rate(self) -> float:
        """Requests per second.

        Raises:
            UsageError: for what is none, or several.
        """
        from nanoserve.benchmarks.serving.requests import parse_rates

        rates = parse_rates(self.request_rate, "--request-rate")
        if len(rates) > 1:
            raise UsageError(f"--request-rate takes one rate here, not {self.request_rate!r:.40}")
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
def pipeline(
    *,
    lengths: LengthOptions,
    comparison: ComparisonOptions,
    engine: PipelineOptions,
    results: ResultOptions,
) -> int:
    """Run the same requests under several policies on the same workers, in interleaved rounds.

    Printed are tokens per second and latencies, where the stages' time went (bubbles), how even the micro-batches
    were, ratios with their spread, and what the simulator makes of the same stage times. Answers have the length
    that was asked for, prompts are random, no prefixes are shared.

    [bold]Examples[/bold]

      nanoserve bench pipeline --pp 2 -m dummy:smollm2-135m --request-rate 2 --plot pipeline.png
      nanoserve bench pipeline --policy throttling --metadata both --json metadata.json
      nanoserve bench pipeline --policy sarathi --against-one-process --rounds 5
    """
    from nanoserve.benchmarks.policy_names import parse_policies
    from nanoserve.benchmarks.variants import KeptRuns
    from nanoserve.measures.chrome_trace import ChromeTraceFile

    engine.check_is_for_cpu()
    config, metadatas, rate, seed = engine.config(), comparison.metadatas(), comparison.rate, engine.seed or 0
    policies = tuple(parse_policies(engine.policy, engine.max_num_batched_tokens))
    work = lengths.read(seed)
    report = results.open_report("pipeline", _settings(work, comparison, engine))
    operators = settled_operators(engine.threads)
    with ExitStack() as opened:
        trace = None if engine.trace_out is None else ChromeTraceFile(Path(engine.trace_out))
        keeper = KeptRuns(None if trace is None else opened.enter_context(trace))
        opened.enter_context(kept(report, lambda: _show(report, results, keeper)))
        resolved, model = resolved_model(engine)
        engines = _open_engines(resolved, config, metadatas, comparison, opened)
        scheduling, work = _scheduling(engines, config, model, work, report)
        variants = _contenders(engines, policies, scheduling)
        bench = _bench(variants, work, rate, seed, config, model, keeper)
        report.put("engine", _facts(resolved, config, model, engines, bench, operators))
        measure_rounds([(bench, {})], comparison.rounds, report)
    return EXIT_OK


def _settings(work: "Work", comparison: ComparisonOptions, engine: PipelineOptions) -> dict[str, Any]:
    """For the report."""
    return {
        "work": work.name,
        "requests": len(work.shapes),
        "request_rate": comparison.request_rate,
        "rounds": comparison.rounds,
        "policies": engine.policy,
        "metadata": comparison.metadata,
        "pp": engine.pp,
        "tp": engine.tp,
        "pp_split": engine.pp_split,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "seed": engine.seed or 0,
    }


def _open_engines(
    resolved: "ResolvedModel",
    config: EngineConfig,
    metadatas: "Sequence[Metadata]",
    comparison: ComparisonOptions,
    opened: ExitStack,
) -> "list[OpenEngine]":
    """Each once, for all rounds."""
    from nanoserve.benchmarks.pipeline.engines import open_one_process, open_workers, workers_name

    engines = []
    for metadata in metadatas:
        remark(f"starting {workers_name(config, metadata)}")
        with show_progress() as progress:
            engines.append(open_workers(resolved, config, metadata, progress))
        opened.callback(engines[-1].close)
    if comparison.against_one_process:
        remark("opening one process")
        with show_progress() as progress:
            engines.append(open_one_process(resolved, config, progress))
        opened.callback(engines[-1].close)
    return engines


def _scheduling(
    engines: "Sequence[OpenEngine]", config: EngineConfig, model: "ModelConfig", work: "Work", report: "Report"
) -> "tuple[Scheduling, Work]":
    """What all schedulers share, and the requests that fit."""
    from nanoserve.benchmarks.pipeline.engines import common_context
    from nanoserve.benchmarks.pipeline.policies import Scheduling

    num_blocks, context = common_context(engines, config, model)
    scheduling = Scheduling(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
    )
    return scheduling, fitting_work(work, context, report)


def _contenders(engines: "Sequence[OpenEngine]", policies: Sequence[str], scheduling: "Scheduling") -> "list[Variant]":
    from nanoserve.benchmarks.pipeline.rounds import Variant

    return [
        Variant(
            policy=policy,
            engine=engine.name,
            executor=engine.executor,
            make_scheduler=scheduling.maker(policy, engine.executor),
            workers=engine.workers,
            tensor_parallel=engine.tensor_parallel,
            simulated=engine.simulated,
        )
        for engine in engines
        for policy in policies
    ]


def _bench(
    variants: "Sequence[Variant]",
    work: "Work",
    rate: float,
    seed: int,
    config: EngineConfig,
    model: "ModelConfig",
    keeper: "KeptRuns",
) -> "Bench":
    import torch

    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.floors import ModelCost
    from nanoserve.benchmarks.pipeline.rounds import Bench
    from nanoserve.benchmarks.pipeline.running import make_requests
    from nanoserve.benchmarks.roofline import STAGE, BandwidthProbe, machine_limits
    from nanoserve.benchmarks.serving.requests import poisson_arrivals
    from nanoserve.benchmarks.variants import KeptRun
    from nanoserve.models.dtypes import resolve_dtype

    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    remark(f"{STAGE} ...")
    probe = BandwidthProbe()
    with show_progress() as progress:
        limits = machine_limits(dtype, probe, progress=progress)

    def requests(number: int) -> "list[Request]":
        own = 1000 * seed + number
        arrivals = poisson_arrivals(rate, len(work.shapes), own)
        return make_requests(work.shapes, arrivals, model.vocab_size, own)

    return Bench(
        case=work.name,
        variants=variants,
        make_requests=requests,
        vocab_size=model.vocab_size,
        cost=ModelCost(model, dtype.itemsize),
        limits=limits,
        probe=probe.read,
        foreign=ForeignLoad(),
        keep=lambda variant, run: keeper.keep(KeptRun(variant.name, run, variant.layouts)),
    )


def _facts(
    resolved: "ResolvedModel",
    config: EngineConfig,
    model: "ModelConfig",
    engines: "Sequence[OpenEngine]",
    bench: "Bench",
    operators: str,
) -> dict[str, Any]:
    import torch

    from nanoserve.benchmarks.peers.weights import dtype_name
    from nanoserve.processes.threads import threads_of_each

    return {
        "model": resolved.name,
        "dtype": dtype_name(config.dtype, model),
        "operators": operators,
        "layers": "compiled" if all(engine.compiled for engine in engines) else "eager",
        "threads": torch.get_num_threads(),
        "threads_of_a_worker": threads_of_each(config.num_workers),
        "kv_blocks": min(engine.num_blocks for engine in engines),
        "limit_read_gb_per_s": bench.limits.bytes_per_second / 1e9,
        "limit_gflops": bench.limits.operations_per_second / 1e9,
    }


def _show(report: "Report", results: ResultOptions, keeper: "KeptRuns") -> None:
    from nanoserve.commands.pipeline_tables import show_pipeline

    title = show_pipeline(report)
    if results.plot is not None:
        from nanoserve.benchmarks.pipeline.picture import plot_runs

        plot_runs(results.plot, report.titled(f"{title}, last round"), list(keeper.last.values()))
