"""``nanoserve bench latency``: how long one batch takes, for a grid of batch sizes and lengths."""

from typing import TYPE_CHECKING, Annotated

from nanoserve.commands.bench_options import (
    GridOptions,
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

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report


@on_all_machines
def latency(
    *,
    grid: GridOptions,
    repeats: Annotated[int, work_option("--repeats", help="Measured runs of each case.", min=1)] = 3,
    no_probe: NoProbe = False,
    engine: WorkersOptions,
    results: ResultOptions,
) -> int:
    """Time batches of equal requests: first token, each token after it, tokens per second.

    Every case runs once unmeasured, then --repeats times with new random prompts.

    [bold]Examples[/bold]

      nanoserve bench latency
      nanoserve bench latency -m dummy:qwen3-0.6b --batch-sizes 1,16 --input 128,512 --json latency.json
    """
    from nanoserve.measures.workloads import RequestShape

    engine.check_is_for_cpu()
    cases = grid.cases()
    report = results.open_report("latency", {"cases": [case.name for case in cases], "repeats": repeats})
    with show_progress() as progress:
        llm = engine.open_llm(progress)
    with llm, kept(report, lambda: _show(report, results)), show_progress() as progress:
        from nanoserve.benchmarks.local import LocalBench  # imports torch, for which opening sets the threads first

        bench = LocalBench(llm, seed=engine.seed or 0, announce=remark, progress=progress, probes=not no_probe)
        report.put("engine", bench.facts)
        work = {case.name: [RequestShape(case.input_tokens, case.output_tokens)] * case.batch for case in cases}
        for name, shapes in work.items():
            bench.check_fits(shapes, name)
            bench.expect(shapes, runs=1 + repeats)
        for name, shapes in work.items():
            remark(f"measuring {name}")
            bench.warm_up(shapes)
            report.add(bench.measure(name, shapes, repeats=repeats))
    return EXIT_OK


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.tables import Column, print_table

    rates = [
        Column("prefill tok/s", "prefill_tokens_per_s", ",.0f"),
        Column("decode tok/s", "decode_tokens_per_s", ",.1f"),
    ]
    columns = [
        Column("batch x in+out", "case"),
        Column("TTFT ms", "ttft_ms.p50", ",.1f"),
        Column("p99", "ttft_ms.p99", ",.1f"),
        Column("TPOT ms", "tpot_ms.p50", ",.2f"),
        Column("p99", "tpot_ms.p99", ",.2f"),
        *rates,
        Column("foreign cores", "foreign_cores", ".2f"),
    ]
    facts = report.document["engine"]
    title = f"latency of {facts['model']}, {engine_title(facts)}"
    print_head(report)
    print_table(title, columns, report.rows)
    print_steps(report)
    if results.plot is not None:
        bars = [Column("TTFT ms", "ttft_ms.p50", ".1f"), *rates]
        plot_bars(results.plot, report.titled(title), "{case}", bars, report.rows)
