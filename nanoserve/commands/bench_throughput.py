"""``nanoserve bench throughput``: many requests of different lengths at once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from nanoserve.commands.bench_options import (
    MOST_REQUESTS,
    NoProbe,
    ResultOptions,
    engine_title,
    kept,
    print_head,
    print_steps,
    work_option,
)
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.workers_options import WorkersOptions
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.measures.workloads import RequestShape

DEFAULT_PRESET = "cpu"


@on_all_machines
def throughput(
    *,
    preset: Annotated[
        str | None,
        work_option(
            "--preset",
            help="nano-vllm: 256 requests of 100-1024 tokens in and out; cpu: 32 of 25-256 (default); "
            "cpu-small: 16 of 12-128.",
            metavar="NAME",
        ),
    ] = None,
    trace: Annotated[
        Path | None, work_option("--trace", help="Lengths from a CSV file instead.", metavar="FILE")
    ] = None,
    requests: Annotated[
        int | None, work_option("--requests", help="Only so many of them.", min=1, max=MOST_REQUESTS)
    ] = None,
    repeats: Annotated[int, work_option("--repeats", help="Measured runs.", min=1)] = 1,
    no_probe: NoProbe = False,
    engine: WorkersOptions,
    results: ResultOptions,
) -> int:
    """Give the engine all requests at once and see how fast it gets through them.

    Lengths come from a preset or a trace (of whose arrival times nothing is taken); the prompts are random.
    Requests of a trace that are longer than the context are left out and counted.

    [bold]Examples[/bold]

      nanoserve bench throughput -m dummy:smollm2-135m
      nanoserve bench throughput --trace AzureLLMInferenceTrace_conv.csv --requests 100 --json azure.json
    """
    from nanoserve.measures.workloads import RequestShape

    engine.check_is_for_cpu()
    name, shapes = _work(preset, trace, requests, engine.seed or 0)
    report = results.open_report("throughput", {"work": name, "requests": len(shapes), "repeats": repeats})
    with show_progress() as progress:
        llm = engine.open_llm(progress)
    with llm, kept(report, lambda: _show(report, results)), show_progress() as progress:
        from nanoserve.benchmarks.local import LocalBench  # imports torch, for which opening sets the threads first

        bench = LocalBench([llm], seed=engine.seed or 0, announce=remark, progress=progress, probes=not no_probe)
        report.put("engine", bench.facts)
        if trace is not None:
            fitting = [shape for shape in shapes if shape.total_tokens <= llm.max_model_len]
            if left_out := len(shapes) - len(fitting):
                report.note(f"{left_out} requests are longer than the context of {llm.max_model_len} and left out")
            shapes = fitting or shapes
        bench.check_fits(shapes, name)
        warm_up = [RequestShape(min(64, shape.input_tokens), 2) for shape in shapes]
        bench.expect(warm_up, runs=1)
        bench.expect(shapes, runs=repeats)
        bench.warm_up(warm_up)
        remark(f"measuring {len(shapes)} requests of {name}")
        for row in bench.measure(name, shapes, repeats=repeats):
            report.add(row)
    return EXIT_OK


def _work(preset: str | None, trace: Path | None, requests: int | None, seed: int) -> tuple[str, list["RequestShape"]]:
    from nanoserve.measures.workloads import PRESETS, read_trace

    if trace is not None:
        if preset is not None:
            raise UsageError("give --preset or --trace, not both")
        return trace.name, read_trace(trace, requests)
    preset = preset or DEFAULT_PRESET
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset!r} is not one of {', '.join(PRESETS)}")
    return preset, PRESETS[preset].draw(seed)[:requests]


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.tables import Column, print_table

    rates = [
        Column("output tok/s", "output_tokens_per_s", ",.1f"),
        Column("total tok/s", "total_tokens_per_s", ",.1f"),
    ]
    columns = [
        Column("work", "case"),
        Column("requests", "requests", ",d"),
        Column("seconds", "seconds", ",.1f"),
        Column("requests/s", "requests_per_s", ",.2f"),
        *rates,
        Column("foreign cores", "foreign_cores", ".2f"),
    ]
    facts = report.document["engine"]
    title = f"throughput of {facts['model']}, {engine_title(facts)}"
    print_head(report)
    print_table(title, columns, report.rows)
    latencies = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    rows = [{"metric": name.removesuffix("_ms").upper(), **(report.rows[0][name] or {})} for name in latencies]
    percentiles = [Column(name, name, ",.1f") for name in ("mean", "p50", "p90", "p99", "max")]
    print_table("milliseconds", [Column("metric", "metric"), Column("n", "n", ",d"), *percentiles], rows)
    print_steps(report)
    if results.plot is not None:
        plot_bars(results.plot, report.titled(title), "{case}", rates, report.rows)
