"""What the benchmarks share: where results go, and keeping what was measured when they are interrupted."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.options import option, switch
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure
from nanoserve.processes.interrupts import deferred_interrupts
from nanoserve.processes.threads import prepare_threads

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.measures.workloads import BatchCase

WORK_PANEL = "Work"
RESULTS_PANEL = "Results"
MOST_REQUESTS = 1_000_000
"""Of a run whose lengths or prompts are all in memory before it begins."""


def work_option(*names: str, help: str, metavar: str = "N", **settings: Any) -> Any:
    """An option that says what is measured; no environment variable, so that a command line tells the whole story."""
    return option(*names, panel=WORK_PANEL, help=help, metavar=metavar, envvar=None, **settings)


NoProbe = Annotated[
    bool,
    switch(
        "--no-probe",
        panel=WORK_PANEL,
        help="Do not measure what the machine does at best: begins sooner, and names no floors.",
        envvar=None,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridOptions:
    """Batches of equal requests: every combination of these sizes and lengths."""

    batch_sizes: Annotated[str, work_option("--batch-sizes", help="Requests at a time.", metavar="N,N,...")] = "1,4,16"
    input_lengths: Annotated[str, work_option("--input", help="Prompt lengths.", metavar="N,N,...")] = "128"
    output_lengths: Annotated[str, work_option("--output", help="Answer lengths.", metavar="N,N,...")] = "32"

    def cases(self) -> "list[BatchCase]":
        """Batch sizes vary slowest.

        Raises:
            UsageError: for what is no list of sizes, naming the flag.
        """
        from nanoserve.measures.workloads import grid, parse_sizes

        return grid(
            parse_sizes(self.batch_sizes, "--batch-sizes"),
            parse_sizes(self.input_lengths, "--input"),
            parse_sizes(self.output_lengths, "--output"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Where the results go, beside the table on stdout."""

    json_file: Annotated[
        Path | None,
        option("--json", panel=RESULTS_PANEL, help="Write all figures to this file.", metavar="FILE", envvar=None),
    ] = None
    plot: Annotated[
        Path | None,
        option("--plot", panel=RESULTS_PANEL, help="Draw a chart into this PNG file.", metavar="FILE", envvar=None),
    ] = None

    def open_report(self, kind: str, settings: dict[str, Any]) -> "Report":
        """A new report; fails here, before anything is measured, if it cannot be written or drawn.

        Raises:
            UsageError: if matplotlib is missing.
            RuntimeFailure: if the file cannot be written.
        """
        from nanoserve.benchmarks.report import Report
        from nanoserve.measures.figures import check_plotting

        check_plotting(self.plot)
        return Report(kind, settings, self.json_file)


@contextmanager
def kept(report: "Report", show: Callable[[], None]) -> Iterator[None]:
    """Measure inside; what was measured until the end, or until Ctrl-C or a failure, is shown."""
    try:
        yield
        report.finish()
    except KeyboardInterrupt:
        place = f", {report.path} keeps them" if report.path else ""
        raise KeyboardInterrupt(f"{len(report.rows)} rows were measured{place}") from None
    finally:
        if report.rows:
            show()


def print_head(report: "Report") -> None:
    """Machine and versions in a line or two, above the table."""
    document = report.document
    machine, versions = document["machine"], document["versions"]
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['system']}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()) + f", commit {document['commit']}")
    for note in (*document["notes"], report.busy_note):
        if note is not None:
            print(note)


def settled_operators(threads: int | None) -> str:
    """Wait until it is known which operators run, and say which; for commands that open no LLM in this process."""
    prepare_threads(threads)
    with deferred_interrupts():  # libraries go on half imported, and fail later in their own words
        from nanoserve.benchmarks.settling import settle_operators
    return settle_operators(remark)


def engine_title(facts: dict[str, Any]) -> str:
    """How an engine ran, for the title of a table."""
    operators = facts["operators"].partition(" (")[0]
    return (
        f"{facts['dtype']}, {operators} operators, {facts['layers']} layers, {facts['threads']} threads,"
        f" {facts['policy']}"
    )


def print_steps(report: "Report") -> None:
    """What each kind of step achieved against the floor of its bytes and operations, and the engine's share of it."""
    from nanoserve.benchmarks.tables import Column, print_table

    columns = [
        Column("steps of", "case"),
        Column("kind", "kind"),
        Column("steps", "steps", ",d"),
        Column("ms", "step_ms.p50", ",.2f"),
        Column("p99", "step_ms.p99", ",.2f"),
        Column("GB/s", "read_gb_per_s", ",.1f"),
        Column("GFLOP/s", "gflops", ",.0f"),
        Column("of floor", "of_floor", ".0%"),
        Column("engine ms", "engine_ms", ".3f"),
        Column("engine share", "engine_share", ".1%"),
    ]
    facts = report.document["engine"]
    title = "steps"
    if "limit_gflops" in facts:
        floor = f"{facts['limit_read_gb_per_s']:.1f} GB/s and {facts['limit_gflops']:,.0f} GFLOP/s"
        title = f"steps, against the floor of their bytes and operations at {floor}"
    rows = [{"case": row["case"], "kind": kind, **steps} for row in report.rows for kind, steps in row["steps"].items()]
    print_table(title, columns, rows)


def make_directory(directory: Path) -> None:
    """Have a directory to write into, before anything runs that takes minutes. Raises RuntimeFailure."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFailure(f"cannot make the directory {directory}: {error.strerror or error}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RuntimeFailure(f"cannot write into the directory {directory}: no permission")
