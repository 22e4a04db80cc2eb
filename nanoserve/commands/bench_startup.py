"""``nanoserve bench startup``: from a new process to its first tokens."""

from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_options import ResultOptions, kept, print_head, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import EngineOptions
from nanoserve.commands.progress import watched
from nanoserve.commands.terminal import remark
from nanoserve.processes.temporary import temporary_directory

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report


def startup(
    *,
    repeats: Annotated[
        int, work_option("--repeats", help="Warm starts, after the first ever and a cold one.", min=1)
    ] = 3,
    engine: EngineOptions,
    results: ResultOptions,
) -> int:
    """Time each stage from the start of a process: imports, loading, first token, and the two after it.

    The first start finds an empty cache, so it also builds the C++ operators and compiles the layers, which takes a
    minute or two. The next one is cold: the files of torch, nanoserve and the model were dropped from the page cache
    before, as far as no other process holds them.

    [bold]Example[/bold]

      nanoserve bench startup -m dummy:smollm2-135m
    """
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.starting import drop_from_page_cache, library_directories, start_once
    from nanoserve.models.hub import resolve_model

    settings = engine.settings()
    report = results.open_report("startup", {"model": engine.model, "repeats": repeats, "engine": settings})
    directory = resolve_model(engine.model, offline=engine.offline).directory
    model = engine.model if directory is None else str(directory)  # with another cache the hub's could not be found
    with temporary_directory() as cache, kept(report, lambda: _show(report, results)):
        for case in watched(["first ever", "cold", *["warm"] * repeats], "starts"):
            remark(f"starting a process, {case}")
            if case == "cold":
                drop_from_page_cache([*library_directories(), *([] if directory is None else [directory])])
            foreign = ForeignLoad()
            start = start_once(model, settings, engine.threads, cache)
            row: dict[str, Any] = {"case": case, "stages": start.stages}
            row |= {"to_first_token": start.to_first_token, "foreign_cores": foreign.read()}
            report.put("operators", start.operators)
            report.put("layers", start.layers)
            report.add(row)
    return EXIT_OK


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.starting import STAGES, TO_FIRST_TOKEN
    from nanoserve.benchmarks.tables import Column, print_table

    stages = [Column(name, f"stages.{name}", ".2f") for name in STAGES]
    total = Column("to first token", "to_first_token", ".2f")
    model = report.document["settings"]["model"] or "the bundled storyteller"
    kind = f"{report.document['operators'].partition(' (')[0]} operators, {report.document['layers']} layers"
    title = f"seconds to start {model}, {kind}"
    warm = [row["to_first_token"] for row in report.rows if row["case"] == "warm"]
    report.put("samples", {"warm": {"to_first_token_s": warm}})
    print_head(report)
    print_table(title, [Column("start", "case"), *stages, total], report.rows)
    if results.plot is not None:
        plot_bars(results.plot, report.titled(title), "{case}", [*stages[: len(TO_FIRST_TOKEN)], total], report.rows)
