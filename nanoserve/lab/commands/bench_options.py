"""Options and output that the benchmarks share: requests, where results go, and the lines around
the tables."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import Options, file_option, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import Column, columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.machine import machine_text
from nanoserve.lab.benchmarks.plots import plot_bars
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.rounds import Repeating
from nanoserve.lab.benchmarks.serving.requests import Work
from nanoserve.lab.charts import check_plotting
from nanoserve.lab.workloads import (
    PRESETS,
    BatchCase,
    parse_lengths,
    parse_sizes,
    read_arrivals,
    read_trace,
)
from nanoserve.request import RequestShape
from nanoserve.utils.interrupts import deferred_interrupts
from nanoserve.utils.threads import prepare_threads

if TYPE_CHECKING:
    from nanoserve.lab.benchmarks.local import LocalBench

RESULTS_PANEL = "Results"
# the most requests of a run whose lengths or prompts are all in memory before it begins
MOST_REQUESTS = 1_000_000
DEFAULT_REQUESTS = 32
_NAMES = f"{', '.join(PRESETS)}, a name as in simulate, or IN+OUT tokens"


class ProbeOptions(Options):
    no_probe: bool = option(
        False, "Do not measure what the machine does at best: begins sooner, and names no floors."
    )


class RoundOptions(Options):
    keep_all: bool = option(
        False,
        "Count what is measured while others disturb it; otherwise that is repeated for at most "
        "two minutes.",
    )

    def repeating(self) -> Repeating:
        return Repeating(self.keep_all)


class GridOptions(Options):
    batch_sizes: tuple[int, ...] = option(
        "1,4,16", "Requests at a time.", metavar="N,N,...", parse=parse_sizes
    )
    lengths: tuple[RequestShape, ...] = option(
        "128+32", "Tokens of a prompt and of its answer.", metavar="IN+OUT,...", parse=parse_lengths
    )

    def cases(self) -> list[BatchCase]:
        """All combinations; batch sizes vary slowest."""
        pairs = product(self.batch_sizes, self.lengths)
        return [BatchCase(size, shape.input_tokens, shape.output_tokens) for size, shape in pairs]


class LengthOptions(Options):
    """How long requests are: by a name, by a trace, or all alike."""

    default_lengths: ClassVar[str] = "cpu-small"
    lengths: str | None = option(None, f"{_NAMES}; default: cpu-small.", metavar="NAME")
    trace: Path | None = file_option("Lengths from a CSV file.")
    requests: int | None = option(None, "Requests of a run.", minimum=1, maximum=MOST_REQUESTS)

    def read(self, seed: int, *, traced: bool = False) -> Work:
        """Read or draw the requests: the same for the same seed, with the times of the trace if
        ``traced``. Raises UsageError."""
        if self.lengths is not None and self.trace is not None:
            raise UsageError("give --lengths or --trace, not both")
        if traced and self.trace is None:
            raise UsageError("--arrivals trace needs the --trace whose times they are")
        if self.trace is not None:
            times: list[float] | None = None
            if traced:
                times = read_arrivals(self.trace, self.requests)
            return Work(self.trace.name, read_trace(self.trace, self.requests), times)
        name = self.lengths or self.default_lengths
        if (preset := PRESETS.get(name)) is not None:
            return Work(name, replace(preset, requests=self.requests or preset.requests).draw(seed))
        # and the simulator, which is not asked otherwise
        from nanoserve.lab.simulator.workload import named_lengths

        return Work(
            name,
            list(
                islice(named_lengths(name, seed, tuple(PRESETS)), self.requests or DEFAULT_REQUESTS)
            ),
        )


class JsonOptions(Options, panel=RESULTS_PANEL):
    json: Path | None = file_option("Write all figures to this file.")

    def open_report(self, kind: str, settings: dict[str, Any]) -> Report:
        """A new report. Raises UsageError if matplotlib is missing, RuntimeFailure if the file
        cannot be written."""
        return Report(kind, settings, self.json)

    @contextmanager
    def reported(
        self, kind: str, settings: dict[str, Any], show: Callable[[Report, Self], str | None]
    ) -> Iterator[Report]:
        """A new report to measure into. ``show`` prints it at the end, and returns the verdict of a
        benchmark, which is the last line. Raises as ``open_report`` does."""
        report = self.open_report(kind, settings)
        with kept(report, partial(show, report, self)):
            yield report


class ResultOptions(JsonOptions, panel=RESULTS_PANEL):
    plot: Path | None = file_option("Draw a chart into this PNG file.")

    def open_report(self, kind: str, settings: dict[str, Any]) -> Report:
        check_plotting(self.plot)
        return super().open_report(kind, settings)

    def draw_bars(
        self,
        report: Report,
        title: str,
        label: str,
        bars: Sequence[Column],
        rows: Sequence[dict[str, Any]],
    ) -> None:
        """Draw a bar for each row, if a chart is wanted; ``label`` is a format string over the
        row."""
        if self.plot is not None:
            plot_bars(self.plot, report.titled(title), label, bars, rows)


@contextmanager
def kept(report: Report, show: Callable[[], str | None]) -> Iterator[None]:
    """Measure inside; what was measured until the end, or until Ctrl-C or a failure, is shown. The
    last line is the verdict that ``show`` returns, if it returns one."""
    try:
        yield
        report.finish()
    except KeyboardInterrupt:
        if not report.rows:
            raise
        words = f"{len(report.rows)} rows were measured"
        if report.path:
            words += f", {report.path} keeps them"
        raise KeyboardInterrupt(words) from None
    finally:
        if report.rows and (verdict := show()) is not None:
            report.put("verdict", verdict)
            print(verdict)


def fitting_work(work: Work, context: int | None, report: Report) -> Work:
    """The requests that a context has room for, all if it is None; the report says how many are
    left out. Raises UsageError if none is left."""
    places = [
        place
        for place, one in enumerate(work.shapes)
        if context is None or one.total_tokens <= context
    ]
    if not places:
        raise UsageError(
            f"every request of {work.name} is longer than the context of {context} tokens"
        )
    if left_out := len(work.shapes) - len(places):
        report.note(f"{left_out} requests are longer than the context of {context} and left out")
    times: list[float] | None = None
    if work.times is not None:
        times = [work.times[place] for place in places]
    return Work(work.name, [work.shapes[place] for place in places], times)


def local_bench(
    engines: Sequence[EngineOptions],
    report: Report,
    opened: ExitStack,
    *,
    probes: bool,
    repeating: Repeating,
) -> "LocalBench":
    """A bench of one or two engines of this process, which close with ``opened``; the report has
    its facts."""
    llms = [opened.enter_context(engine.open_llm()) for engine in engines]
    progress = opened.enter_context(show_progress())
    # imports torch, for which opening sets the threads first
    from nanoserve.lab.benchmarks.local import LocalBench

    seed = engines[0].seed or 0
    bench = LocalBench(
        llms, seed=seed, announce=remark, progress=progress, probes=probes, repeating=repeating
    )
    report.put("engine", bench.facts)
    return bench


def settled_operators(threads: int | None) -> str:
    """Wait until it is known which operators run, and say which; for commands that open no LLM in
    this process."""
    prepare_threads(threads)
    with deferred_interrupts():  # libraries go on half imported, and fail later in their own words
        from nanoserve.lab.benchmarks.settling import settle_operators
    return settle_operators(remark)


def engine_title(facts: Mapping[str, Any]) -> str:
    numbers = facts["dtype"]
    if facts["quantization"] not in (None, "none"):
        numbers = f"{facts['quantization']}, {numbers}"
    return f"{numbers}, {operators_title(facts)}, {facts['threads']} threads, {facts['policy']}"


def operators_title(facts: Mapping[str, Any]) -> str:
    """Name the code that computed: "C++ operators, compiled layers"."""
    return f"{facts['operators'].partition(' (')[0]} operators, {facts['layers']} layers"


def print_head(report: Report) -> None:
    document = report.document
    versions = [f"{name} {version}" for name, version in document["versions"].items()]
    print(machine_text(document["machine"]))
    print(", ".join([*versions, f"commit {document['commit']}"]))
    for note in document["notes"]:
        print(note)
    if report.busy_note is not None:
        print(report.busy_note)


def print_results(report: Report, title: str, columns: Sequence[Column]) -> None:
    print_head(report)
    print_table(title, columns, report.rows)


_STEP_COLUMNS = columns(
    ("", ("steps of", "case"), "kind"),
    (",d", "steps"),
    (",.2f", ("ms", "step_ms.p50")),
    (",.1f", ("GB/s", "read_gb_per_s")),
    (",.0f", ("GFLOP/s", "gflops")),
    (".0%", "of_floor"),
    (".1%", "engine_share"),
)
_DISTRIBUTION_COLUMNS = columns(
    ("", "metric"), (",d", "n"), (",.1f", "mean", "p50", "p90", "p99", "max")
)
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}


def print_latencies(report: Report, keys: Sequence[Column] = ()) -> None:
    """Print how each latency of each row is distributed; the columns ``keys`` tell the rows
    apart."""
    rows = [
        {**row, "metric": LATENCIES[name], **(row[name] or {})}
        for row in report.rows
        for name in LATENCIES
    ]
    print_table("milliseconds", list(keys) + _DISTRIBUTION_COLUMNS, rows)


def print_steps(report: Report) -> None:
    """Print what each kind of step achieved against the floor of its bytes and operations, and the
    engine's share."""
    facts = report.document["engine"]
    title = "steps"
    if facts.get("floor_holds") is False:
        print(
            "no shares of the floor: steps took less, so this machine was busy whenever its limits "
            "were looked at"
        )
    elif "limit_gflops" in facts:
        limits = "{limit_read_gb_per_s:.1f} GB/s and {limit_gflops:,.0f} GFLOP/s"
        title += f", against the floor of their bytes and operations at {limits.format(**facts)}"
    rows = [
        {"case": row["case"], "kind": kind, **steps}
        for row in report.rows
        for kind, steps in row["steps"].items()
    ]
    if rows:
        print_table(title, _STEP_COLUMNS, rows)


def make_directory(directory: Path) -> None:
    """Have a directory to write into, before anything runs that takes minutes. Raises
    RuntimeFailure."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFailure(
            f"cannot make the directory {directory}: {error.strerror or error}"
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RuntimeFailure(f"cannot write into the directory {directory}: no permission")
