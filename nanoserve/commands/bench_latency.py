"""``nanoserve bench latency``: how long one batch takes, for a grid of batch sizes and lengths."""

from contextlib import ExitStack
from dataclasses import replace

from nanoserve.benchmarks.report import Report
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.commands.bench_options import (
    GridOptions,
    ProbeOptions,
    ResultOptions,
    engine_title,
    kept,
    print_head,
    print_steps,
)
from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape
from nanoserve.runtime.launch.rendezvous import TorchrunProcess

_RATES = [
    Column("prefill tok/s", "prefill_tokens_per_s", ",.0f"),
    Column("decode tok/s", "decode_tokens_per_s", ",.1f"),
]
_BARS = [Column("TTFT ms", "ttft_ms.p50", ".1f"), Column("TPOT ms", "tpot_ms.p50", ".2f"), *_RATES]
_COLUMNS = [
    Column("batch x in+out", "case"),
    Column("TTFT ms", "ttft_ms.p50", ",.1f"),
    Column("p99", "ttft_ms.p99", ",.1f"),
    Column("TPOT ms", "tpot_ms.p50", ",.2f"),
    Column("p99", "tpot_ms.p99", ",.2f"),
    *_RATES,
    Column("foreign cores", "foreign_cores", ".2f"),
]
_RATIO_COLUMNS = [
    Column("batch x in+out", "case"),
    Column("metric", "metric"),
    Column("rounds", "rounds", "d"),
    *(Column(name, name, ".2f") for name in ("median", "low", "high")),
]


class LatencyOptions(GridOptions, ProbeOptions, WorkersOptions, ResultOptions):
    """All options of the command."""

    repeats: int = option(3, "Measured runs of each case.", minimum=1)
    layers: str | None = option(
        None,
        "eager, compiled, or both as eager,compiled: in interleaved runs, with their ratio.",
        metavar="NAME,...",
    )

    def each(self) -> "list[LatencyOptions]":
        """The options of each engine to open: as given, or one for each kind of layers.

        Raises:
            UsageError: for a kind that is none, --eager beside it, and two engines under torchrun.
        """
        if self.layers is None:
            return [self]
        kinds = dict.fromkeys(self.layers.split(","))
        if not kinds.keys() <= {"eager", "compiled"}:
            raise UsageError(f"--layers {self.layers}: choose eager, compiled or eager,compiled")
        if self.eager:
            raise UsageError("--eager and --layers say the same; leave one of them out")
        if len(kinds) > 1 and TorchrunProcess.from_environment() is not None:
            raise UsageError(
                f"--layers {self.layers}: torchrun starts the workers of one engine; choose eager or compiled"
            )
        return [replace(self, eager=kind == "eager") for kind in kinds]


@on_all_machines
def run(options: LatencyOptions) -> None:
    """Every case runs once unmeasured, then --repeats times with new random prompts. With --layers eager,compiled both
    kinds of layers run the same prompts in turn, and what compiling gains is printed as a ratio with its spread.

    [bold]Examples[/bold]

      nanoserve bench latency
      nanoserve bench latency -m dummy:qwen3-0.6b --batch-sizes 1,16 \\
        --lengths 128+32,512+32 --json latency.json
      nanoserve bench latency --layers eager,compiled --repeats 7
    """
    options.check_is_for_cpu()
    engines = options.each()
    cases, repeats = options.cases(), options.repeats
    report = options.open_report("latency", {"cases": [case.name for case in cases], "repeats": repeats})
    with ExitStack() as opened:
        llms = [opened.enter_context(engine.open_llm()) for engine in engines]
        opened.enter_context(kept(report, lambda: _show(report, options)))
        progress = opened.enter_context(show_progress())
        # imports torch, for which opening sets the threads first
        from nanoserve.benchmarks.local import LocalBench, compiled_ratios

        seed, probes = options.seed or 0, not options.no_probe
        bench = LocalBench(llms, seed=seed, announce=remark, progress=progress, probes=probes)
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


def _show(report: Report, options: ResultOptions) -> None:
    facts = report.document["engine"]
    title = f"latency of {facts['model']}, {engine_title(facts)}"
    print_head(report)
    print_table(title, _COLUMNS, report.rows)
    if ratios := report.document.get("ratios"):
        heading = "compiled layers over eager ones, ratios within a round; above 1 compiled ones are faster"
        print_table(heading, _RATIO_COLUMNS, ratios, keys=2)
    print_steps(report)
    options.draw_bars(report, title, "{case}", _BARS, report.rows)
