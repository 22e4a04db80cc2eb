"""``nanoserve bench latency``: how long one batch takes, for a grid of batch sizes and lengths."""

from contextlib import ExitStack
from dataclasses import replace

from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.options import option
from nanoserve.commands.tables import columns, print_table
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.errors import UsageError
from nanoserve.executor.start.rendezvous import TorchrunProcess
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.verdicts import of_layers, of_steps
from nanoserve.lab.commands.bench_options import (
    GridOptions,
    ProbeOptions,
    ResultOptions,
    RoundOptions,
    engine_title,
    local_bench,
    print_results,
    print_steps,
)
from nanoserve.lab.workloads import LocalCase
from nanoserve.request import RequestShape

_CASE = ("batch x in+out", "case")
_RATES = columns(
    (",.0f", ("prefill tok/s", "prefill_tokens_per_s")),
    (",.1f", ("decode tok/s", "decode_tokens_per_s")),
)
_BARS = columns((".1f", ("TTFT ms", "ttft_ms.p50")), (".2f", ("TPOT ms", "tpot_ms.p50"))) + _RATES
_COLUMNS = columns(
    ("", _CASE), (",.1f", ("TTFT ms", "ttft_ms.p50")), (",.2f", ("TPOT ms", "tpot_ms.p50"))
)
_COLUMNS += _RATES + columns(("", ("runs", "repeats")), (".2f", "foreign_cores"))
_RATIO_COLUMNS = columns(("", _CASE, "metric", "rounds"), (".2f", "median", "low", "high"))


class LatencyOptions(GridOptions, ProbeOptions, RoundOptions, WorkersOptions, ResultOptions):
    repeats: int = option(3, "Measured runs of each case.", minimum=1)
    layers: str | None = option(
        None,
        "eager, compiled, or both as eager,compiled: in interleaved runs, with their ratio.",
        metavar="NAME,...",
    )

    def each(self) -> "list[LatencyOptions]":
        """The options of each engine to open: as given, or one for each kind of layers. Raises
        UsageError."""
        if self.layers is None:
            return [self]
        kinds = dict.fromkeys(self.layers.split(","))
        if not kinds.keys() <= {"eager", "compiled"}:
            raise UsageError(f"--layers {self.layers}: choose eager, compiled or eager,compiled")
        if self.eager:
            raise UsageError("--eager and --layers say the same; leave one of them out")
        if len(kinds) > 1 and TorchrunProcess.from_environment() is not None:
            one = "torchrun starts workers for one of them"
            raise UsageError(f"--layers {self.layers}: {one}; choose eager or compiled")
        return [replace(self, eager=kind == "eager") for kind in kinds]


@on_all_machines
def run(options: LatencyOptions) -> None:
    """Every case runs once unmeasured, then --repeats times with new random prompts. With --layers
    eager,compiled both kinds of layers run the same prompts in turn, and what compiling gains is
    printed as a ratio with its spread.

    [bold]Examples[/bold]

      nanoserve bench latency
      nanoserve bench latency -m dummy:qwen3-0.6b --batch-sizes 1,16 \\
        --lengths 128+32,512+32 --json latency.json
      nanoserve bench latency --layers eager,compiled --repeats 7
    """
    options.check_is_for_cpu()
    engines, cases = options.each(), options.cases()
    shapes = {
        case.name: [RequestShape(case.input_tokens, case.output_tokens)] * case.batch
        for case in cases
    }
    work = [LocalCase(name, several, several, name) for name, several in shapes.items()]
    settings = {"cases": [case.name for case in cases], "repeats": options.repeats}
    with options.reported("latency", settings, _show) as report, ExitStack() as opened:
        bench = local_bench(
            engines, report, opened, probes=not options.no_probe, repeating=options.repeating()
        )
        bench.run(work, report, repeats=options.repeats)


def _show(report: Report, options: ResultOptions) -> str:
    facts = report.document["engine"]
    title = f"latency of {facts['model']}, {engine_title(facts)}"
    print_results(report, title, _COLUMNS)
    if ratios := report.document.get("ratios"):
        heading = (
            "compiled layers over eager ones, ratios within a round; above 1 compiled ones are "
            "faster"
        )
        print_table(heading, _RATIO_COLUMNS, ratios, keys=2)
    print_steps(report)
    options.draw_bars(report, title, "{case}", _BARS, report.rows)
    verdict = of_steps(report.rows)
    if ratios:
        verdict = of_layers(ratios)
    return f"{verdict}; {report.document['counting']}."
