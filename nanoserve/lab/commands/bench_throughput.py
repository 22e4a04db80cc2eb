"""``nanoserve bench throughput``: many requests of different lengths at once."""

from contextlib import ExitStack

from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.options import option
from nanoserve.commands.tables import columns
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.verdicts import of_steps
from nanoserve.lab.commands.bench_options import (
    LengthOptions,
    ProbeOptions,
    ResultOptions,
    RoundOptions,
    engine_title,
    fitting_work,
    local_bench,
    print_latencies,
    print_results,
    print_steps,
)
from nanoserve.lab.workloads import LocalCase
from nanoserve.request import RequestShape

_RATES = columns((",.1f", ("output tok/s", "output_tokens_per_s")))
_COUNTS = columns(("", ("work", "case")), (",d", "requests"), (",.1f", "seconds"))
_COLUMNS = _COUNTS + columns((",.2f", ("requests/s", "requests_per_s"))) + _RATES
_COLUMNS += columns(("", ("runs", "repeats")), (".2f", "foreign_cores"))


class ThroughputOptions(LengthOptions, ProbeOptions, RoundOptions, WorkersOptions, ResultOptions):
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
    """Only the lengths of a trace are taken, not its times. Prompts are random. Requests of a trace
    that are longer than the context are left out and counted.

    [bold]Examples[/bold]

      nanoserve bench throughput -m dummy:smollm2-135m
      nanoserve bench throughput --trace AzureLLMInferenceTrace_conv.csv \\
        --requests 100 --json azure.json
    """
    options.check_is_for_cpu()
    work = options.read(options.seed or 0)
    settings = {"work": work.name, "requests": len(work.shapes), "repeats": options.repeats}
    with options.reported("throughput", settings, _show) as report, ExitStack() as opened:
        repeating = options.repeating()
        bench = local_bench(
            [options], report, opened, probes=not options.no_probe, repeating=repeating
        )
        if options.trace is not None:
            work = fitting_work(work, bench.longest, report)
        shapes = work.shapes
        warm_up = [RequestShape(min(64, shape.input_tokens), 2) for shape in shapes]
        announced = f"{len(shapes)} requests of {work.name}"
        bench.run(
            [LocalCase(work.name, shapes, warm_up, announced)], report, repeats=options.repeats
        )


def _show(report: Report, options: ResultOptions) -> str:
    facts = report.document["engine"]
    title = f"throughput of {facts['model']}, {engine_title(facts)}"
    print_results(report, title, _COLUMNS)
    print_latencies(report)
    print_steps(report)
    options.draw_bars(report, title, "{case}", _RATES, report.rows)
    return f"{of_steps(report.rows)}; {report.document['counting']}."
