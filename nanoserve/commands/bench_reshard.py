"""``nanoserve bench reshard``: two parallel layouts on the same workers, in turn, and each of them alone."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.resharding.picture import plot_runs
from nanoserve.benchmarks.resharding.policies import ReshardScheduling, Workers
from nanoserve.benchmarks.resharding.rounds import RATIOS, ReshardBench, ReshardRound, ReshardVariant, pairs
from nanoserve.benchmarks.serving.requests import Work
from nanoserve.benchmarks.tables import print_table
from nanoserve.benchmarks.variants import KeptRun, KeptRuns
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
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.config import ModelConfig
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.models.hub import ResolvedModel
from nanoserve.runtime.launch.torchrun import TorchrunProcess

_MOVES = {"re-sharding": "reshards", "swaps out": "swaps_out", "swaps in": "swaps_in"}
_KEYS = (("policy, layouts", "variant"), ("read", "state"))
_RUN_COLUMNS = columns(
    *_KEYS,
    ("rounds", "rounds"),
    ("seconds", "seconds", ",.2f"),
    ("output tok/s", "output_tokens_per_s", ",.1f"),
    ("total tok/s", "total_tokens_per_s", ",.1f"),
    ("steps", "steps", ",.0f"),
    ("preempted", "preemptions", ",.0f"),
    ("transitions", "transitions", ",.0f"),
    ("pool peak", "pool_peak", ".0%"),
    ("foreign cores", "foreign_cores", ".2f"),
)
_PHASE_COLUMNS = columns(
    *_KEYS,
    ("prefill", "phases.prefill", ",.2f"),
    ("decode", "phases.decode", ",.2f"),
    ("draining", "phases.draining", ",.3f"),
    ("re-sharding", "phases.resharding", ",.3f"),
    ("prefill tok/s", "phases.prefill_tokens_per_s", ",.1f"),
    ("decode tok/s", "phases.decode_tokens_per_s", ",.1f"),
    ("through the pool", "phases.through_pool", ",.0f"),
    ("finished", "phases.finished", ",.0f"),
    ("recomputed", "phases.recomputed", ",.0f"),
)
_MOVE_COLUMNS = columns(
    *_KEYS,
    ("moves", "moves"),
    ("number", "count", ",.0f"),
    ("MB", "megabytes", ",.1f"),
    ("seconds", "seconds", ",.3f"),
    ("GB/s of a worker", "gb_per_s", ",.2f"),
    ("of host link", "share_of_link", ".0%"),
    ("behind computing", "hidden", ".0%"),
)
_RATIO_COLUMNS = columns(("variants", "variants"), ("read", "state"), ("rounds", "rounds"), ("tok/s", "text"))
_SIMULATED_COLUMNS = columns(
    *_KEYS,
    ("makespan", "simulated.makespan", ".3f"),
    ("transitions", "simulated.simulated_transitions", ",.0f"),
    ("plans", "simulated.plans", ",.0f"),
    ("replayed", "simulated.replayed", ",.0f"),
    ("others when simulated", "simulated.others", ",.0f"),
)


class ReshardOptions(LengthOptions, RoundsOptions, RandomModelOptions, ResultOptions, panel=WORK_PANEL):
    """All options of the command: requests, and workers with two layouts."""

    against_own_workers: bool = option(False, "Also each layout on workers that have no other.")
    prefill_parallel: str | None = option("p2", "Layout for prompts.", metavar="NAME", variables=())
    decode_parallel: str | None = option("t2", "Layout for decodes.", metavar="NAME", variables=())

    def config(self) -> EngineConfig:
        """How the workers run; policies are for each run's own scheduler.

        Raises:
            UsageError: for a setting out of range, a policy, and several engines; and for more groups of workers than
                torchrun started.
        """
        if self.against_own_workers and TorchrunProcess.from_environment() is not None:
            raise UsageError("--against-own-workers takes three groups of workers, but torchrun started one")
        if self.policy is not None:
            raise UsageError("--policy: this command compares those that it names; leave it out")
        if self.layouts()[0].data_parallel > 1:
            raise UsageError(f"{PAIR_OPTIONS[0]} {self.prefill_parallel}: one engine is measured; leave out the D")
        return EngineConfig(**{**WorkersOptions.settings(self), "trace": None})


@on_all_machines
def run(options: ReshardOptions) -> int:
    """All requests come at once, answers have the length that was asked for, prompts are random. Printed are tokens per
    second, where the time went, what was moved between device and host memory and how fast, ratios with their
    spread, and what the simulator makes of the same step times.

    [bold]Examples[/bold]

      nanoserve bench reshard -m dummy:qwen2.5-0.5b --max-model-len 1024 \\
        --host-kv-memory 64MiB --plot pool.png
      nanoserve bench reshard --prefill-parallel p2 --decode-parallel t2 \\
        --lengths 256+32 --requests 64
      nanoserve bench reshard --against-own-workers --rounds 5 \\
        --json reshard.json --record reshard-trace.json
    """
    options.check_is_for_cpu()
    config, seed = options.config(), options.seed or 0
    work = options.read(seed)
    report = options.open_report("reshard", _settings(work, options))
    operators = settled_operators(options.threads)
    with ExitStack() as opened:
        keeper = KeptRuns(opened_record(options, opened))
        resolved, model = resolved_model(options)
        groups = _open_workers(resolved, config, model, options, opened)
        variants, work = _variants(groups, config, model, work, report)
        opened.enter_context(kept(report, lambda: _show(report, options, keeper, pairs(variants))))
        bench = _bench(variants, work, seed, model, keeper)
        facts = engine_facts(resolved, config, model, operators, compiled=all(group.compiled for group in groups))
        report.put("engine", {**facts, **_memory_facts(groups[0])})
        measure_rounds([(bench, {})], options.rounds, report)
    return EXIT_OK


def _settings(work: Work, options: ReshardOptions) -> dict[str, Any]:
    """What the report says about the options."""
    return {
        "work": work.name,
        "requests": len(work.shapes),
        "rounds": options.rounds,
        "against_own_workers": options.against_own_workers,
        "prefill_parallel": options.prefill_parallel,
        "decode_parallel": options.decode_parallel,
        "host_kv_memory": options.host_kv_memory,
        "kv_cache_memory": options.kv_cache_memory,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "seed": options.seed or 0,
    }


def _open_workers(
    resolved: ResolvedModel, config: EngineConfig, model: ModelConfig, options: ReshardOptions, opened: ExitStack
) -> list[Workers]:
    """Each group once, for all rounds; the first has both layouts."""
    from nanoserve.benchmarks.resharding.engines import open_alone, open_pair

    names = [layout.name for layout in config.layouts]
    remark(f"starting workers for {names[0]} and {names[1]}")
    groups = [opened_engine(opened, partial(open_pair, resolved, config, model))]
    for number, name in enumerate(names) if options.against_own_workers else ():
        remark(f"starting workers for {name} alone")
        groups.append(opened_engine(opened, partial(open_alone, resolved, config, number, model)))
    return groups


def _variants(
    groups: Sequence[Workers], config: EngineConfig, model: ModelConfig, work: Work, report: Report
) -> tuple[list[ReshardVariant], Work]:
    """The variants, and the requests that fit all of them."""
    blocks = min(capacity.num_blocks for group in groups for capacity in group.capacities)
    blocks = min(blocks, groups[0].host_blocks)
    context = min(config.max_model_len or model.max_position_embeddings, blocks * config.block_size)
    scheduling = ReshardScheduling(
        block_size=config.block_size,
        max_model_len=context,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
    )
    return list(scheduling.variants(groups)), fitting_work(work, context, report)


def _bench(
    variants: Sequence[ReshardVariant], work: Work, seed: int, model: ModelConfig, keeper: KeptRuns
) -> ReshardBench:
    from nanoserve.benchmarks.roofline import BandwidthProbe

    return ReshardBench(
        case=work.name,
        variants=variants,
        make_requests=requests_maker(work.shapes, model.vocab_size, seed),
        vocab_size=model.vocab_size,
        probe=BandwidthProbe().read,
        foreign=ForeignLoad(),
        keep=lambda variant, run: keeper.keep(
            KeptRun(variant.name, run, variant.layouts), variant.place.host_link_bandwidth
        ),
    )


def _memory_facts(pair: Workers) -> dict[str, Any]:
    return {
        "kv_blocks": " and ".join(f"{capacity.num_blocks:,}" for capacity in pair.capacities),
        "host_blocks": pair.host_blocks,
        "host_link_bandwidth": pair.host_link_bandwidth,
    }


def _show(report: Report, options: ResultOptions, keeper: KeptRuns, held: Sequence[tuple[str, str, str]]) -> None:
    summary, compared = put_summary(report, rounds_of(report, ReshardRound), held, RATIOS)
    settings, facts = report.document["settings"], report.document["engine"]
    title = f"{settings['requests']} requests of {settings['work']}; {facts['model']}, {facts['dtype']}"
    if summary:
        print_table(f"{title}, {_how(facts)}", _RUN_COLUMNS, summary, keys=2)
        in_turn = [row for row in summary if row["phases"] is not None]
        print_table("where the time of re-sharding runs went, in seconds", _PHASE_COLUMNS, in_turn, keys=2)
        print_table("what was moved between device and host memory", _MOVE_COLUMNS, _move_rows(in_turn), keys=3)
        ratio_rows = [
            {"variants": one.variants, "state": one.state, "rounds": one.rounds, "text": ratio_text(one)}
            for one in compared
        ]
        print_table("output tok/s within a round: median (lowest-highest)", _RATIO_COLUMNS, ratio_rows, keys=2)
    if simulated := [row for row in summary if row["simulated"]]:
        heading = "simulated, with what steps and moves of the real runs took; makespan is simulated over real"
        print_table(heading, _SIMULATED_COLUMNS, simulated, keys=2)
    if options.plot is not None:
        plot_runs(options.plot, report.titled(f"{title}, last round"), list(keeper.last.values()))


def _how(facts: Mapping[str, Any]) -> str:
    """Describe the engine's setup."""
    threads = f"{facts['threads']} threads, {facts['threads_of_a_worker']} of them for each worker"
    blocks = f"KV blocks: {facts['kv_blocks']} on the devices, {facts['host_blocks']:,} in the host pool"
    return f"{operators_title(facts)}, {threads}; {blocks}"


def _move_rows(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for each kind of moves."""
    return [
        {
            "variant": row["variant"],
            "state": row["state"],
            "moves": moves,
            "megabytes": row[field]["num_bytes"] / 1e6,
            **row[field],
        }
        for row in summary
        for moves, field in _MOVES.items()
    ]
