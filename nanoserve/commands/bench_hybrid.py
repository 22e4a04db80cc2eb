"""``nanoserve bench hybrid``: attention on the CPU beside the device, as several policies have it, and without."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_options import (
    MOST_REQUESTS,
    ResultOptions,
    kept,
    settled_operators,
    work_option,
)
from nanoserve.commands.bench_rounds import measure_rounds, resolved_model
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import ENGINE_PANEL, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.workers_options import WorkersOptions
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.hybrid.cases import Case, Work
    from nanoserve.benchmarks.hybrid.policies import HybridEngine
    from nanoserve.benchmarks.hybrid.rounds import Bench
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.variants import KeptRuns
    from nanoserve.config import ModelConfig
    from nanoserve.models.hub import ResolvedModel
    from nanoserve.request import Request

_OPENED_WITH = "hybrid"
"""The policy that an engine is opened with which runs all of them: it wants all that any of them does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridOptions(WorkersOptions):
    """One device, host memory beside it, and a CPU that attends to what is there."""

    policy: Annotated[
        str,
        option(
            "--policy",
            panel=ENGINE_PANEL,
            help="Each on its own, the device alone first; overlap:cohorts=4 with parameters.",
            metavar="NAME,NAME",
            envvar=None,
        ),
    ] = "sarathi,neo,overlap,apex,hybrid"

    def config(self) -> EngineConfig:
        """Of the engine that all policies run on; they are for each run's own scheduler.

        Raises:
            UsageError: for a setting out of range, for more than one device, and for memory that is for --kv-limits.
        """
        if self.kv_cache_memory is not None:
            raise UsageError("--kv-cache-memory: how much there is, --kv-limits says; leave it out")
        config = EngineConfig(**{**WorkersOptions.settings(self), "policy": _OPENED_WITH, "trace": None})
        if config.num_workers * config.data_parallel > 1 or config.decode_layout is not None:
            raise UsageError(
                f"one device is measured: leave out --dp, --pp, --tp, {PAIR_OPTIONS[0]} and {PAIR_OPTIONS[1]}"
            )
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridWorkOptions:
    """What is asked, and with how much memory."""

    input_tokens: Annotated[int, work_option("--input", help="Length of every prompt.", min=1, max=2**20)] = 256
    outputs: Annotated[str, work_option("--output", help="Answer lengths, one after the other.", metavar="N,N,...")] = (
        "48,96,192"
    )
    requests: Annotated[
        int, work_option("--requests", help="Requests of a run, all at once.", min=1, max=MOST_REQUESTS)
    ] = 16
    kv_limits: Annotated[
        str,
        work_option(
            "--kv-limits", help="KV memory of the device, as shares of what holds everything.", metavar="X,X,..."
        ),
    ] = "0.25,0.5,1"
    rounds: Annotated[int, work_option("--rounds", help="Rounds of each case that count.", min=1)] = 3

    def read(self, block_size: int) -> "Work":
        """All cases.

        Raises:
            UsageError: for what is no list of lengths or shares, and for shares that hold no request.
        """
        from nanoserve.benchmarks.hybrid.cases import Work, parse_shares
        from nanoserve.measures.workloads import parse_sizes

        work = Work(
            input_tokens=self.input_tokens,
            outputs=sorted(parse_sizes(self.outputs, "--output")),
            requests=self.requests,
            shares=parse_shares(self.kv_limits),
            block_size=block_size,
        )
        list(work.cases())
        return work


def hybrid(*, asked: HybridWorkOptions, engine: HybridOptions, results: ResultOptions) -> int:
    """Run the same requests on the device alone and with attention on the CPU, as several policies have it.

    Answers get longer, as in APEX's figure 7, and the device's KV memory smaller; with the last limit it holds
    everything. All requests come at once, prompts are random. Printed are throughput with ratios to the first policy,
    latencies by where the KV was, how busy device and CPU were, how well steps were predicted, how much of the closed
    forms' bounds was reached, and what the simulator makes of what is measured before each round. Of two cores, give
    each one to one side.

    [bold]Examples[/bold]

      nanoserve bench hybrid --threads 1 --host-threads 1 --plot hybrid.png
      nanoserve bench hybrid -m dummy:smollm2-135m --input 256 --output 64,256 --kv-limits 0.2,1 --rounds 5
      nanoserve bench hybrid --policy sarathi,overlap,overlap:cohorts=4,hybrid --json hybrid.json
    """
    from nanoserve.benchmarks.hybrid.policies import parse_contenders
    from nanoserve.benchmarks.variants import KeptRuns
    from nanoserve.measures.chrome_trace import ChromeTraceFile

    config, work = engine.config(), asked.read(engine.block_size)
    policies = parse_contenders(engine.policy, config.max_num_batched_tokens)
    report = results.open_report("hybrid", _settings(work, asked, engine))
    operators = settled_operators(engine.threads)
    with ExitStack() as opened:
        trace = None if engine.trace_out is None else ChromeTraceFile(Path(engine.trace_out))
        keeper = KeptRuns(None if trace is None else opened.enter_context(trace))
        resolved, model = resolved_model(engine)
        _check_fits(work, config, model)
        running = _open(resolved, config, model, work, opened)
        opened.enter_context(kept(report, lambda: _show(report, results, policies)))
        report.put("engine", _facts(resolved, config, model, running, operators))
        benches = _benches(running, policies, work, config, model, keeper, engine.seed or 0)
        facts = [
            {"share": case.share, "output": case.shape.output_tokens, "blocks": case.num_blocks}
            for case in work.cases()
        ]
        measure_rounds(list(zip(benches, facts, strict=True)), asked.rounds, report)
    return EXIT_OK


def _settings(work: "Work", asked: HybridWorkOptions, engine: HybridOptions) -> dict[str, Any]:
    """For the report."""
    return {
        "work": work.name,
        "input": work.input_tokens,
        "outputs": list(work.outputs),
        "requests": work.requests,
        "kv_limits": list(work.shares),
        "rounds": asked.rounds,
        "policies": engine.policy,
        "host_kv_memory": engine.host_kv_memory,
        "host_threads": engine.host_threads,
        "profile": engine.profile,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "seed": engine.seed or 0,
    }


def _check_fits(work: "Work", config: EngineConfig, model: "ModelConfig") -> None:
    longest, context = work.longest.total_tokens, config.max_model_len or model.max_position_embeddings
    if longest > context:
        raise UsageError(
            f"--input {work.input_tokens} and --output {work.longest.output_tokens} are {longest} tokens, more than the"
            f" context of {context}: choose shorter ones"
        )


def _open(
    resolved: "ResolvedModel", config: EngineConfig, model: "ModelConfig", work: "Work", opened: ExitStack
) -> "HybridEngine":
    """Once, for all runs."""
    from nanoserve.benchmarks.hybrid.engines import open_engine

    with show_progress() as progress:
        running = open_engine(resolved, config, model, work, progress)
    opened.callback(running.close)
    return running


def _benches(
    running: "HybridEngine",
    policies: Sequence[str],
    work: "Work",
    config: EngineConfig,
    model: "ModelConfig",
    keeper: "KeptRuns",
    seed: int,
) -> "list[Bench]":
    """One for each case."""
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.hybrid.policies import Scheduling
    from nanoserve.benchmarks.hybrid.rounds import Bench
    from nanoserve.benchmarks.pipeline.running import make_requests
    from nanoserve.benchmarks.roofline import BandwidthProbe
    from nanoserve.benchmarks.variants import KeptRun

    scheduling = Scheduling(
        running,
        policies,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
    )
    probe, foreign = BandwidthProbe(), ForeignLoad()

    def bench(case: "Case") -> Bench:
        def requests(number: int) -> "list[Request]":
            return make_requests(case.shapes, [0.0] * case.requests, model.vocab_size, 1000 * seed + number)

        return Bench(
            case=case.name,
            variants=list(scheduling.variants(case)),
            make_requests=requests,
            vocab_size=model.vocab_size,
            probe=probe.read,
            foreign=foreign,
            keep=lambda variant, run: keeper.keep(KeptRun(f"{case.name}, {variant.name}", run)),
            engine=running,
            block_size=config.block_size,
        )

    return [bench(case) for case in work.cases()]


def _facts(
    resolved: "ResolvedModel", config: EngineConfig, model: "ModelConfig", running: "HybridEngine", operators: str
) -> dict[str, Any]:
    import torch

    from nanoserve.benchmarks.peers.weights import dtype_name

    return {
        "model": resolved.name,
        "dtype": dtype_name(config.dtype, model),
        "operators": operators,
        "layers": "compiled" if running.compiled else "eager",
        "threads": torch.get_num_threads(),
        "host_threads": running.host_threads,
        "host_blocks": running.host_blocks,
        "model_layers": model.num_layers,
    }


def _show(report: "Report", results: ResultOptions, policies: Sequence[str]) -> None:
    from nanoserve.commands.hybrid_tables import measured_cases, show_hybrid

    title = show_hybrid(report, policies)
    if results.plot is not None:
        from nanoserve.benchmarks.hybrid.picture import plot_throughputs

        plot_throughputs(results.plot, report.titled(title), measured_cases(report))
