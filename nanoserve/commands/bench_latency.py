"""``nanoserve bench latency``: how long one batch takes, for a grid of batch sizes and lengths."""

from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.commands.bench_options import (
    WORK_PANEL,
    GridOptions,
    ProbeOptions,
    ResultOptions,
    engine_title,
    kept,
    print_head,
    print_steps,
)
from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.measures.workloads import RequestShape

_RATES = [
    Column("prefill tok/s", "prefill_tokens_per_s", ",.0f"),
    Column("decode tok/s", "decode_tokens_per_s", ",.1f"),
]
_COLUMNS = [
    Column("batch x in+out", "case"),
    Column("TTFT ms", "ttft_ms.p50", ",.1f"),
    Column("p99", "ttft_ms.p99", ",.1f"),
    Column("TPOT ms", "tpot_ms.p50", ",.2f"),
    Column("p99", "tpot_ms.p99", ",.2f"),
    *_RATES,
    Column("foreign cores", "foreign_cores", ".2f"),
]


class LatencyOptions(GridOptions, ProbeOptions, WorkersOptions, ResultOptions, panel=WORK_PANEL):
    """All options of the command."""

    repeats: int = option(3, "Measured runs of each case.", minimum=1)


@on_all_machines
def run(options: LatencyOptions) -> int:
    """Every case runs once unmeasured, then --repeats times with new random prompts.

    [bold]Examples[/bold]

      nanoserve bench latency
      nanoserve bench latency -m dummy:qwen3-0.6b --batch-sizes 1,16 \\
        --lengths 128+32,512+32 --json latency.json
    """
    options.check_is_for_cpu()
    cases, repeats = options.cases(), options.repeats
    report = options.open_report("latency", {"cases": [case.name for case in cases], "repeats": repeats})
    with show_progress() as progress:
        llm = options.open_llm(progress)
    with llm, kept(report, lambda: _show(report, options)), show_progress() as progress:
        from nanoserve.benchmarks.local import LocalBench  # imports torch, for which opening sets the threads first

        seed = options.seed or 0
        bench = LocalBench(llm, seed=seed, announce=remark, progress=progress, probes=not options.no_probe)
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


def _show(report: Report, options: ResultOptions) -> None:
    facts = report.document["engine"]
    title = f"latency of {facts['model']}, {engine_title(facts)}"
    print_head(report)
    print_table(title, _COLUMNS, report.rows)
    print_steps(report)
    options.draw_bars(report, title, "{case}", [Column("TTFT ms", "ttft_ms.p50", ".1f"), *_RATES], report.rows)
