"""``nanoserve bench reshard``: two parallel layouts on the same workers, in turn, and each of them alone."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_lengths import LengthOptions
from nanoserve.commands.bench_options import WORK_PANEL, ResultOptions, kept, settled_operators, work_option
from nanoserve.commands.bench_rounds import fitting_work, measure_rounds, resolved_model
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import MODEL_PANEL, option, switch
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.workers_options import WORKERS_PANEL, WorkersOptions
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.runtime.launch.torchrun import TorchrunProcess

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.resharding.policies import Workers
    from nanoserve.benchmarks.resharding.rounds import Bench, Variant
    from nanoserve.benchmarks.serving.work import Work
    from nanoserve.benchmarks.variants import KeptRuns
    from nanoserve.config import ModelConfig
    from nanoserve.models.hub import ResolvedModel
    from nanoserve.request import Request

DEFAULT_MODEL = "dummy:qwen3-0.6b"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(WorkersOptions):
    """Workers with two layouts."""

    model: Annotated[
        str | None,
        option("--model", "-m", panel=MODEL_PANEL, help="Directory, hub id or dummy:NAME.", metavar="MODEL"),
    ] = DEFAULT_MODEL
    prefill_parallel: Annotated[
        str | None,
        option(PAIR_OPTIONS[0], panel=WORKERS_PANEL, help="Layout for prompts.", metavar="NAME", envvar=None),
    ] = "p2"
    decode_parallel: Annotated[
        str | None,
        option(PAIR_OPTIONS[1], panel=WORKERS_PANEL, help="Layout for decodes.", metavar="NAME", envvar=None),
    ] = "t2"

    def config(self) -> EngineConfig:
        """Of the workers; policies are for each run's own scheduler.

        Raises:
            UsageError: for a setting out of range, a policy, and several engines.
        """
        if self.policy is not None:
            raise UsageError("--policy: this command compares those that it names; leave it out")
        if self.layouts()[0].data_parallel > 1:
            raise UsageError(f"{PAIR_OPTIONS[0]} {self.prefill_parallel}: one engine is measured; leave out the D")
        return EngineConfig(**{**WorkersOptions.settings(self), "trace": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions:
    """What is held against what."""

    rounds: Annotated[int, work_option("--rounds", help="Rounds that count.", min=1)] = 3
    against_own_workers: Annotated[
        bool,
        switch(
            "--against-own-workers",
            panel=WORK_PANEL,
            help="Also each layout on workers that have no other.",
            envvar=None,
        ),
    ] = False

    def check(self) -> None:
        """That there are workers for it.

        Raises:
            UsageError: where torchrun has started others.
        """
        if self.against_own_workers and TorchrunProcess.from_environment() is not None:
            raise UsageError("--against-own-workers takes three groups of workers, but torchrun started one")


@on_all_machines
def reshard(
    *,
    lengths: LengthOptions,
    comparison: ComparisonOptions,
    engine: ReshardOptions,
    results: ResultOptions,
) -> int:
    """Run the same requests in two layouts in turn, as three policies have it, and in each layout alone.

    All requests come at once, answers have the length that was asked for, prompts are random. Printed are tokens per
    second, where the time went, what was moved between device and host memory and how fast, ratios with their
    spread, and what the simulator makes of the same step times.

    [bold]Examples[/bold]

      nanoserve bench reshard -m dummy:qwen2.5-0.5b --max-model-len 1024 --host-kv-memory 64MiB --plot pool.png
      nanoserve bench reshard --prefill-parallel p2 --decode-parallel t2 --input 256 --output 32 --requests 64
      nanoserve bench reshard --against-own-workers --rounds 5 --json reshard.json --trace-out reshard-trace.json
    """
    from nanoserve.benchmarks.resharding.rounds import pairs
    from nanoserve.benchmarks.variants import KeptRuns
    from nanoserve.measures.chrome_trace import ChromeTraceFile

    engine.check_is_for_cpu()
    comparison.check()
    config, seed = engine.config(), engine.seed or 0
    work = lengths.read(seed)
    report = results.open_report("reshard", _settings(work, comparison, engine))
    operators = settled_operators(engine.threads)
    with ExitStack() as opened:
        trace = None if engine.trace_out is None else ChromeTraceFile(Path(engine.trace_out))
        keeper = KeptRuns(None if trace is None else opened.enter_context(trace))
        resolved, model = resolved_model(engine)
        groups = _open_workers(resolved, config, model, comparison, opened)
        variants, work = _contenders(groups, config, model, work, report)
        opened.enter_context(kept(report, lambda: _show(report, results, keeper, pairs(variants))))
        bench = _bench(variants, work, seed, model, keeper)
        report.put("engine", _facts(resolved, config, model, groups, operators))
        measure_rounds([(bench, {})], comparison.rounds, report)
    return EXIT_OK


def _settings(work: "Work", comparison: ComparisonOptions, engine: ReshardOptions) -> dict[str, Any]:
    """For the report."""
    return {
        "work": work.name,
        "requests": len(work.shapes),
        "rounds": comparison.rounds,
        "against_own_workers": comparison.against_own_workers,
        "prefill_parallel": engine.prefill_parallel,
        "decode_parallel": engine.decode_parallel,
        "host_kv_memory": engine.host_kv_memory,
        "kv_cache_memory": engine.kv_cache_memory,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "seed": engine.seed or 0,
    }


def _open_workers(
    resolved: "ResolvedModel",
    config: EngineConfig,
    model: "ModelConfig",
    comparison: ComparisonOptions,
    opened: ExitStack,
) -> "list[Workers]":
    """Each group once, for all rounds; the first has both layouts."""
    from nanoserve.benchmarks.resharding.engines import open_alone, open_pair

    names = [layout.name for layout in config.layouts]
    remark(f"starting workers for {names[0]} and {names[1]}")
    with show_progress() as progress:
        groups = [open_pair(resolved, config, model, progress)]
    opened.callback(groups[0].close)
    for number, name in enumerate(names) if comparison.against_own_workers else ():
        remark(f"starting workers for {name} alone")
        with show_progress() as progress:
            groups.append(open_alone(resolved, config, number, model, progress))
        opened.callback(groups[-1].close)
    return groups


def _contenders(
    groups: "Sequence[Workers]", config: EngineConfig, model: "ModelConfig", work: "Work", report: "Report"
) -> "tuple[list[Variant], Work]":
    """Who takes part, and the requests that fit all of them."""
    from nanoserve.benchmarks.resharding.policies import Scheduling

    blocks = min(capacity.num_blocks for group in groups for capacity in group.capacities)
    blocks = min(blocks, groups[0].host_blocks)
    context = min(config.max_model_len or model.max_position_embeddings, blocks * config.block_size)
    scheduling = Scheduling(
        block_size=config.block_size,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
    )
    return list(scheduling.variants(groups)), fitting_work(work, context, report)


def _bench(variants: "Sequence[Variant]", work: "Work", seed: int, model: "ModelConfig", keeper: "KeptRuns") -> "Bench":
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.pipeline.running import make_requests
    from nanoserve.benchmarks.resharding.rounds import Bench
    from nanoserve.benchmarks.roofline import BandwidthProbe
    from nanoserve.benchmarks.variants import KeptRun

    def requests(number: int) -> "list[Request]":
        return make_requests(work.shapes, [0.0] * len(work.shapes), model.vocab_size, 1000 * seed + number)

    return Bench(
        case=work.name,
        variants=variants,
        make_requests=requests,
        vocab_size=model.vocab_size,
        probe=BandwidthProbe().read,
        foreign=ForeignLoad(),
        keep=lambda variant, run: keeper.keep(
            KeptRun(variant.name, run, variant.layouts), variant.place.host_link_bandwidth
        ),
    )


def _facts(
    resolved: "ResolvedModel",
    config: EngineConfig,
    model: "ModelConfig",
    groups: "Sequence[Workers]",
    operators: str,
) -> dict[str, Any]:
    import torch

    from nanoserve.benchmarks.peers.weights import dtype_name
    from nanoserve.processes.threads import threads_of_each

    pair = groups[0]
    return {
        "model": resolved.name,
        "dtype": dtype_name(config.dtype, model),
        "operators": operators,
        "layers": "compiled" if all(group.compiled for group in groups) else "eager",
        "threads": torch.get_num_threads(),
        "threads_of_a_worker": threads_of_each(config.num_workers),
        "kv_blocks": " and ".join(f"{capacity.num_blocks:,}" for capacity in pair.capacities),
        "host_blocks": pair.host_blocks,
        "host_link_bandwidth": pair.host_link_bandwidth,
    }


def _show(report: "Report", results: ResultOptions, keeper: "KeptRuns", held: Sequence[tuple[str, str, str]]) -> None:
    from nanoserve.commands.reshard_tables import show_reshard

    title = show_reshard(report, held)
    if results.plot is not None:
        from nanoserve.benchmarks.resharding.picture import plot_runs

        plot_runs(results.plot, report.titled(f"{title}, last round"), list(keeper.last.values()))
