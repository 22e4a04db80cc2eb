"""``nanoserve bench throughput``: many requests of different lengths at once."""

from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.commands.bench_options import (
    DISTRIBUTION_COLUMNS,
    LengthOptions,
    ProbeOptions,
    ResultOptions,
    engine_title,
    fitting_work,
    print_results,
    print_steps,
)
from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.measures.workloads import RequestShape

_RATES = [Column("output tok/s", "output_tokens_per_s", ",.1f"), Column("total tok/s", "total_tokens_per_s", ",.1f")]
_COLUMNS = [
    Column("work", "case"),
    Column("requests", "requests", ",d"),
    Column("seconds", "seconds", ",.1f"),
    Column("requests/s", "requests_per_s", ",.2f"),
    *_RATES,
    Column("foreign cores", "foreign_cores", ".2f"),
]
_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


class ThroughputOptions(LengthOptions, ProbeOptions, WorkersOptions, ResultOptions):
    """All options of the command."""

    default_lengths = "cpu"

    lengths: str | None = option(
        None,
        "nano-vllm: 256 requests of 100-1024 tokens in and out; cpu: 32 of 25-256 (default); "
        "cpu-small: 16 of 12-128; a name as in simulate, or IN+OUT tokens.",
        metavar="NAME",
    )
    repeats: int = option(1, "Measured runs.", minimum=1)


@on_all_machines
def run(options: ThroughputOptions) -> None:
    """Only the lengths of a trace are taken, not its times. Prompts are random. Requests of a trace that are longer
    than the context are left out and counted.

    [bold]Examples[/bold]

      nanoserve bench throughput -m dummy:smollm2-135m
      nanoserve bench throughput --trace AzureLLMInferenceTrace_conv.csv \\
        --requests 100 --json azure.json
    """
    options.check_is_for_cpu()
    seed, repeats = options.seed or 0, options.repeats
    work = options.read(seed)
    settings = {"work": work.name, "requests": len(work.shapes), "repeats": repeats}
    reported = options.reported("throughput", settings, _show)
    with reported as report, options.open_llm() as llm, show_progress() as progress:
        from nanoserve.benchmarks.local import LocalBench  # imports torch, for which opening sets the threads first

        bench = LocalBench([llm], seed=seed, announce=remark, progress=progress, probes=not options.no_probe)
        report.put("engine", bench.facts)
        shapes = (work if options.trace is None else fitting_work(work, llm.max_model_len, report)).shapes
        bench.check_fits(shapes, work.name)
        warm_up = [RequestShape(min(64, shape.input_tokens), 2) for shape in shapes]
        bench.expect(warm_up, runs=1)
        bench.expect(shapes, runs=repeats)
        bench.warm_up(warm_up)
        remark(f"measuring {len(shapes)} requests of {work.name}")
        for row in bench.measure(work.name, shapes, repeats=repeats):
            report.add(row)


def _show(report: Report, options: ResultOptions) -> None:
    facts = report.document["engine"]
    title = f"throughput of {facts['model']}, {engine_title(facts)}"
    print_results(report, title, _COLUMNS)
    rows = [{"metric": name.removesuffix("_ms").upper(), **(report.rows[0][name] or {})} for name in _LATENCIES]
    print_table("milliseconds", [Column("metric", "metric"), *DISTRIBUTION_COLUMNS], rows)
    print_steps(report)
    options.draw_bars(report, title, "{case}", _RATES, report.rows)
