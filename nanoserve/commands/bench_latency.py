"""``nanoserve bench latency``: how long one batch takes, for a grid of batch sizes and lengths."""

from typing import TYPE_CHECKING, Annotated

from nanoserve.commands.bench_options import (
    GridOptions,
    ResultOptions,
    engine_title,
    kept,
    print_head,
    print_steps,
    work_option,
)
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.terminal import load_progress, remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.workers_options import WorkersOptions

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report


@on_all_machines
def latency(
    *,
    grid: GridOptions,
    repeats: Annotated[int, work_option("--repeats", help="Measured runs of each case.", min=1)] = 3,
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
    with load_progress() as progress:
        llm = engine.open_llm(progress)
    with llm:
        from nanoserve.benchmarks.local import LocalBench  # imports torch, for which opening sets the threads first

        bench = LocalBench(llm, seed=engine.seed or 0, announce=remark)
        report.put("engine", bench.facts)
        for case in cases:
            bench.check_fits([RequestShape(case.input_tokens, case.output_tokens)], case.name)
        with kept(report, lambda: _show(report, results)):
            for case in cases:
                remark(f"measuring {case.name}")
                shapes = [RequestShape(case.input_tokens, case.output_tokens)] * case.batch
                bench.warm_up(shapes)
                report.add(bench.measure(case.name, shapes, repeats=repeats))
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
        plot_bars(results.plot, title, "{case}", [Column("TTFT ms", "ttft_ms.p50", ".1f"), *rates], report.rows)
