"""``nanoserve bench hybrid``: attention on the CPU beside the device, as several policies have it, and without."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from statistics import geometric_mean
from typing import Any

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.hybrid.cases import Case, Work, parse_shares
from nanoserve.benchmarks.hybrid.picture import Measured, plot_throughputs
from nanoserve.benchmarks.hybrid.policies import HybridEngine, Scheduling, parse_contenders
from nanoserve.benchmarks.hybrid.rounds import RATIOS, Bench, HybridRound, findings, pairs
from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.benchmarks.variants import KeptRun, KeptRuns, ratios, ratios_within, samples, summarize
from nanoserve.commands.bench_options import (
    MOST_REQUESTS,
    WORK_PANEL,
    ResultOptions,
    kept,
    operators_title,
    print_head,
    settled_operators,
)
from nanoserve.commands.bench_variants import (
    RoundsOptions,
    columns,
    engine_facts,
    measure_rounds,
    opened_engine,
    opened_record,
    ratio_text,
    requests_maker,
    resolved_model,
)
from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import option
from nanoserve.config import ModelConfig
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.measures.workloads import parse_lengths

_OPENED_WITH = "hybrid"
"""The policy that an engine is opened with which runs all of them: it wants all that any of them does."""
_NEVER_WORSE, _PREDICTING = 0.98, "hybrid"
"""What the policy that chooses by prediction is to reach of the device alone, in every case."""
_KEYS = (("case", "case"), ("policy", "variant"))
_STEP_COLUMNS = columns(
    *_KEYS,
    ("device", "steps.device", ",.0f"),
    ("asymmetric", "steps.asymmetric", ",.0f"),
    ("overlap", "steps.overlap", ",.0f"),
    ("tokens on device", "latencies.device.tokens", ",.0f"),
    ("on host", "latencies.host.tokens", ",.0f"),
    ("swaps out", "swaps_out", ",.0f"),
    ("swaps in", "swaps_in", ",.0f"),
    ("preempted", "preemptions", ",.0f"),
    ("engine ms", "engine_ms", ".2f"),
)
_LATENCY_COLUMNS = columns(
    *_KEYS,
    ("TTFT p50", "latencies.ttft_ms.p50", ",.0f"),
    ("p99", "latencies.ttft_ms.p99", ",.0f"),
    ("ms/token p50", "latencies.token_ms.p50", ",.1f"),
    ("p99", "latencies.token_ms.p99", ",.1f"),
    ("ITL device p50", "latencies.device.itl_ms.p50", ",.2f"),
    ("p99", "latencies.device.itl_ms.p99", ",.2f"),
    ("ITL host p50", "latencies.host.itl_ms.p50", ",.2f"),
    ("p99", "latencies.host.itl_ms.p99", ",.2f"),
)
_ERROR_COLUMNS = columns(
    *_KEYS,
    ("steps", "errors.all.steps", ",.0f"),
    ("all", "errors.all.median", ".1%"),
    ("p90", "errors.all.p90", ".0%"),
    ("bias", "errors.all.bias", "+.1%"),
    ("device", "errors.device.median", ".1%"),
    ("asymmetric", "errors.asymmetric.median", ".1%"),
    ("overlap", "errors.overlap.median", ".1%"),
    ("simulated s", "simulated.seconds", ",.2f"),
    ("simulated tok/s", "simulation_error", "+.0%"),
)
_GAIN_COLUMNS = columns(
    *_KEYS,
    ("strategy", "strategy"),
    ("steps", "steps", ",.0f"),
    ("gain", "gain", "+.1%"),
    ("bound", "bound", "+.1%"),
    ("reached", "reached", ".0%"),
)


class HybridOptions(
    RoundsOptions,
    WorkersOptions,
    ResultOptions,
    panel=WORK_PANEL,
    renamed={
        "--input": "is now part of --lengths, as 256+48,256+96",
        "--output": "is now part of --lengths, as 256+48,256+96",
    },
):
    """All options of the command: one device, host memory beside it, and a CPU that attends to what is there."""

    lengths: str = option(
        "256+48,256+96,256+192", "Tokens of every prompt and of answers, one after the other.", metavar="IN+OUT,..."
    )
    requests: int = option(16, "Requests of a run, all at once.", minimum=1, maximum=MOST_REQUESTS)
    kv_limits: str = option(
        "0.25,0.5,1", "KV memory of the device, as shares of what holds everything.", metavar="X,X,..."
    )
    policy: str = option(
        "sarathi,neo,overlap,apex,hybrid",
        "Each on its own, the device alone first; overlap:cohorts=4 with parameters.",
        metavar="NAME,NAME",
        variables=(),
    )

    def config(self) -> EngineConfig:
        """How the engine runs on which all policies run; they are for each run's own scheduler.

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

    def work(self) -> Work:
        """All cases.

        Raises:
            UsageError: for what is no list of lengths or shares, and for shares that hold no request.
        """
        shapes = parse_lengths(self.lengths, "--lengths")
        if len({shape.input_tokens for shape in shapes}) > 1:
            raise UsageError(f"--lengths takes prompts of one length here, not {self.lengths!r:.60}")
        work = Work(
            input_tokens=shapes[0].input_tokens,
            outputs=sorted(shape.output_tokens for shape in shapes),
            requests=self.requests,
            shares=parse_shares(self.kv_limits),
            block_size=self.block_size,
        )
        list(work.cases())
        return work


def run(options: HybridOptions) -> int:
    """Answers get longer, as in APEX's figure 7, and the device's KV memory smaller; with the last limit it holds
    everything. All requests come at once, prompts are random. Printed are throughput with ratios to the first policy,
    latencies by where the KV was, how busy device and CPU were, how well steps were predicted, how much of the closed
    forms' bounds was reached, and what the simulator makes of what is measured before each round. Of two cores, give
    each one to one side.

    [bold]Examples[/bold]

      nanoserve bench hybrid --threads 1 --host-threads 1 --plot hybrid.png
      nanoserve bench hybrid -m dummy:smollm2-135m --lengths 256+64,256+256 \\
        --kv-limits 0.2,1 --rounds 5
      nanoserve bench hybrid --policy sarathi,overlap,overlap:cohorts=4,hybrid
    """
    config, work = options.config(), options.work()
    policies = parse_contenders(options.policy, config.max_num_batched_tokens)
    report = options.open_report("hybrid", _settings(work, options))
    operators = settled_operators(options.threads)
    with ExitStack() as opened:
        keeper = KeptRuns(opened_record(options, opened))
        resolved, model = resolved_model(options)
        _check_fits(work, config, model)
        from nanoserve.benchmarks.hybrid.engines import open_engine  # imports torch: the threads are set

        engine = opened_engine(opened, partial(open_engine, resolved, config, model, work))
        opened.enter_context(kept(report, lambda: _show(report, options, policies)))
        facts = engine_facts(resolved, config, model, operators, compiled=engine.compiled)
        facts |= {"host_threads": engine.host_threads, "host_blocks": engine.host_blocks}
        report.put("engine", facts | {"model_layers": model.num_layers})
        benches = _benches(engine, policies, work, config, model, keeper, options.seed or 0)
        measure_rounds(benches, options.rounds, report)
    return EXIT_OK


def _settings(work: Work, options: HybridOptions) -> dict[str, Any]:
    """What the report says about the options."""
    return {
        "work": work.name,
        "input": work.input_tokens,
        "outputs": list(work.outputs),
        "requests": work.requests,
        "kv_limits": list(work.shares),
        "rounds": options.rounds,
        "policies": options.policy,
        "host_kv_memory": options.host_kv_memory,
        "host_threads": options.host_threads,
        "profile": options.profile,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "seed": options.seed or 0,
    }


def _check_fits(work: Work, config: EngineConfig, model: ModelConfig) -> None:
    longest, context = work.longest.total_tokens, config.max_model_len or model.max_position_embeddings
    if longest > context:
        raise UsageError(
            f"--lengths {work.input_tokens}+{work.longest.output_tokens} are {longest} tokens, more than the"
            f" context of {context}: choose shorter ones"
        )


def _benches(
    engine: HybridEngine,
    policies: Sequence[str],
    work: Work,
    config: EngineConfig,
    model: ModelConfig,
    keeper: KeptRuns,
    seed: int,
) -> list[tuple[Bench, Mapping[str, Any]]]:
    """One for each case, with what the report says about it."""
    from nanoserve.benchmarks.roofline import BandwidthProbe

    scheduling = Scheduling(
        engine,
        policies,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
    )
    probe, foreign = BandwidthProbe(), ForeignLoad()

    def bench(case: Case) -> Bench:
        return Bench(
            case=case.name,
            variants=list(scheduling.variants(case)),
            make_requests=requests_maker(case.shapes, model.vocab_size, seed),
            vocab_size=model.vocab_size,
            probe=probe.read,
            foreign=foreign,
            keep=lambda variant, run: keeper.keep(KeptRun(f"{case.name}, {variant.name}", run)),
            engine=engine,
            block_size=config.block_size,
        )

    return [
        (bench(case), {"share": case.share, "output": case.shape.output_tokens, "blocks": case.num_blocks})
        for case in work.cases()
    ]


def _show(report: Report, options: ResultOptions, policies: Sequence[str]) -> None:
    """Print the tables of a report with rows, and put their figures into it.

    Args:
        policies: the first is what the others are compared with.
    """
    settings, facts = report.document["settings"], report.document["engine"]
    title = f"{settings['work']}; {facts['model']}, {facts['dtype']}"
    summary = _put_figures(report, policies)
    print_head(report)
    counting = sum(row["counts"] for row in report.rows)
    print(f"{counting} of {len(report.rows)} rounds count (read bandwidth drift below 10 %)")
    for finding in _findings(report):
        print(finding)
    if summary:
        threads = f"{facts['threads']} threads for the device, {facts['host_threads']} for attention in host memory"
        heading = f"{title}, {operators_title(facts)}, {threads}"
        print_table(heading, _run_columns(policies[0]), summary, keys=2)
        heading = "steps, what was moved, and what the engine takes per step"
        print_table(heading, _STEP_COLUMNS, summary, keys=2)
        heading = "latencies, in ms: tokens apart by where their KV was"
        print_table(heading, _LATENCY_COLUMNS, summary, keys=2)
        heading = "errors: of the predicted time of steps (median of their sizes), of the simulated output tok/s"
        print_table(heading, _ERROR_COLUMNS, summary, keys=2)
    if bounded := list(_gain_rows(summary)):
        heading = f"steps without prompts: gain over {policies[0]} with the same rows, and the closed forms' bound"
        print_table(heading, _GAIN_COLUMNS, bounded, keys=2)
    if options.plot is not None:
        plot_throughputs(options.plot, report.titled(title), _measured_cases(report))


def _run_columns(device_only: str) -> list[Column]:
    return columns(
        *_KEYS,
        ("read", "state"),
        ("rounds", "rounds"),
        ("seconds", "seconds", ",.2f"),
        ("output tok/s", "output_tokens_per_s", ",.1f"),
        (f"over {device_only}", "ratio"),
        ("TTFT ms", "latencies.ttft_ms.mean", ",.0f"),
        ("ms/token", "latencies.token_ms.mean", ",.1f"),
        ("device", "device_share", ".0%"),
        ("CPU", "processor_share", ".0%"),
        ("foreign cores", "foreign_cores", ".2f"),
    )


def _put_figures(report: Report, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Put into the report medians, ratios, samples and findings of each case; return the medians with the ratios."""
    summary: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for case, (rows, rounds) in _by_case(report).items():
        held = ratios(rounds, pairs(policies), RATIOS)
        texts = {(one.variants.partition(" over ")[0], one.state): one for one in held}
        for row in summarize(rounds):
            ratio = texts.get((row["variant"], row["state"]))
            summary.append({"case": case, **row, "ratio": None if ratio is None else ratio_text(ratio)})
        compared += [{"case": case, "ratio": one} for one in held]
        kept |= {f"{case}, {name}": figures for name, figures in samples(rounds, RATIOS).items()}
        found[case] = findings(rounds, holds_everything=rows[0]["share"] >= 1)
    report.put("summary", summary)
    report.put("ratios", compared)
    report.put("samples", kept)
    report.put("findings", found)
    report.put("means", _means(report, policies))
    return summary


def _means(report: Report, policies: Sequence[str]) -> dict[str, dict[str, float]]:
    """By KV limit, over all lengths of answers: geometric means of the ratios within rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for rows, rounds in _by_case(report).values():
        for done in filter(attrgetter("counts"), rounds):
            for (called, _), ratio in ratios_within(done.variants, pairs(policies), RATIOS).items():
                found.setdefault(f"KV {rows[0]['share']:.0%}", {}).setdefault(called, []).append(ratio)
    return {share: {name: geometric_mean(held) for name, held in of.items()} for share, of in found.items()}


def _by_case(report: Report) -> dict[str, tuple[list[dict[str, Any]], list[HybridRound]]]:
    found: dict[str, tuple[list[dict[str, Any]], list[HybridRound]]] = {}
    for row in report.rows:
        rows, rounds = found.setdefault(row["case"], ([], []))
        rows.append(row)
        rounds.append(msgspec.convert(row["round"], HybridRound))
    return found


def _findings(report: Report) -> Iterator[str]:
    """What was promised, and whether it holds."""
    found = report.document["findings"]
    fitting = {row["case"] for row in report.rows if row["share"] >= 1}
    broken = [f"{name} in {case}" for case in fitting for name in found[case]["hybrid_although_it_fits"]]
    if broken:
        yield f"HYBRID STEPS although the device holds everything: {'; '.join(broken)}"
    elif fitting:
        yield "where the device holds everything, no step was hybrid"
    beyond = [f"{name} in {case}" for case in found for name in found[case]["beyond_bound"]]
    if beyond:
        yield f"beyond the closed forms' bounds in some round: {'; '.join(beyond)}"
    for share, means in report.document["means"].items():
        each = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        yield f"geometric means of all rounds that count, {share}: {each}"
    held = [one for one in report.document["ratios"] if one["ratio"]["variants"].startswith(f"{_PREDICTING} over")]
    worse = [f"{one['ratio']['median']:.2f} in {one['case']}" for one in held if one["ratio"]["median"] < _NEVER_WORSE]
    if held:
        below = f"; below: {'; '.join(worse)}" if worse else ""
        reached = f"{len(held) - len(worse)} of {len(held)} cases with rounds that count"
        yield f"{_PREDICTING} is at {_NEVER_WORSE:.0%} of the device alone or above in {reached}{below}"


def _gain_rows(summary: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each strategy that had steps without prompts."""
    for row in summary:
        for strategy in ("asymmetric", "overlap"):
            if row["gains"] is not None and row["gains"][strategy] is not None:
                gain = row["gains"][strategy]
                yield {"case": row["case"], "variant": row["variant"], "strategy": strategy, **gain}


def _measured_cases(report: Report) -> list[Measured]:
    """What the picture shows: every round, so that its bars tell how far they lie apart."""
    found = []
    for rows, rounds in _by_case(report).values():
        throughputs = {
            name: [done.variants[name].output_tokens_per_s for done in rounds] for name in rounds[0].variants
        }
        found.append(Measured(rows[0]["share"], rows[0]["output"], throughputs))
    return found
