"""``nanoserve bench latency``: how long one batch takes, for a grid of batch sizes and lengths."""

from contextlib import ExitStack
from dataclasses import replace
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
from nanoserve.errors import UsageError
from nanoserve.runtime.launch.torchrun import TorchrunProcess

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report


@on_all_machines
def latency(
    *,
    grid: GridOptions,
    repeats: Annotated[int, work_option("--repeats", help="Measured runs of each case.", min=1)] = 3,
    layers: Annotated[
        str | None,
        work_option(
            "--layers",
            help="eager, compiled, or both as eager,compiled: in interleaved runs, with their ratio.",
            metavar="NAME,...",
        ),
    ] = None,
    no_probe: NoProbe = False,
    engine: WorkersOptions,
    results: ResultOptions,
) -> int:
    """Time batches of equal requests: first token, each token after it, tokens per second.

    Every case runs once unmeasured, then --repeats times with new random prompts. With --layers eager,compiled both
    kinds of layers run the same prompts in turn, and what compiling gains is printed as a ratio with its spread.

    [bold]Examples[/bold]

      nanoserve bench latency
      nanoserve bench latency -m dummy:qwen3-0.6b --batch-sizes 1,16 --input 128,512 --json latency.json
      nanoserve bench latency --layers eager,compiled --repeats 7
    """
    from nanoserve.measures.workloads import RequestShape

    engine.check_is_for_cpu()
    engines = _engines(engine, layers)
    cases = grid.cases()
    report = results.open_report("latency", {"cases": [case.name for case in cases], "repeats": repeats})
    with ExitStack() as opened:
        with show_progress() as progress:
            llms = [opened.enter_context(each.open_llm(progress)) for each in engines]
        opened.enter_context(kept(report, lambda: _show(report, results)))
        progress = opened.enter_context(show_progress())
        # imports torch, for which opening sets the threads first
        from nanoserve.benchmarks.local import LocalBench, compiled_ratios

        bench = LocalBench(llms, seed=engine.seed or 0, announce=remark, progress=progress, probes=not no_probe)
        report.put("engine", bench.facts)
        work = {case.name: [RequestShape(case.input_tokens, case.output_tokens)] * case.batch for case in cases}
        for name, shapes in work.items():
            bench.check_fits(shapes, name)
            bench.expect(shapes, runs=1 + repeats)
        for name, shapes in work.items():
            remark(f"measuring {name}")
            bench.warm_up(shapes)
            rows = bench.measure(name, shapes, repeats=repeats)
            for row in rows:
                report.add(row)
            if len(rows) > 1:
                report.put("ratios", [*report.document.get("ratios", []), *compiled_ratios(name, rows)])
    return EXIT_OK


def _engines(engine: WorkersOptions, layers: str | None) -> list[WorkersOptions]:
    """The options of each engine to open: as given, or one for each kind of layers.

    Raises:
        UsageError: for a kind that is none, --eager beside it, and two engines under torchrun.
    """
    if layers is None:
        return [engine]
    kinds = dict.fromkeys(layers.split(","))
    if not kinds.keys() <= {"eager", "compiled"}:
        raise UsageError(f"--layers {layers}: choose eager, compiled or eager,compiled")
    if engine.eager:
        raise UsageError("--eager and --layers say the same; leave one of them out")
    if len(kinds) > 1 and TorchrunProcess.from_environment() is not None:
        raise UsageError(f"--layers {layers}: torchrun starts the workers of one engine; choose eager or compiled")
    return [replace(engine, eager=kind == "eager") for kind in kinds]


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
    if ratios := report.document.get("ratios"):
        spread = [Column("rounds", "rounds", "d"), *(Column(name, name, ".2f") for name in ("median", "low", "high"))]
        told = "compiled layers over eager ones, ratios within a round; above 1 compiled ones are faster"
        print_table(told, [Column("batch x in+out", "case"), Column("metric", "metric"), *spread], ratios, keys=2)
    print_steps(report)
    if results.plot is not None:
        bars = [Column("TTFT ms", "ttft_ms.p50", ".1f"), *rates]
        plot_bars(results.plot, report.titled(title), "{case}", bars, report.rows)
