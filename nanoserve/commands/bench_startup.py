"""``nanoserve bench startup``: from a new process to its first tokens."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.bench_options import ResultOptions, kept, print_head, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import EngineOptions
from nanoserve.commands.terminal import remark

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report


def startup(
    *,
    repeats: Annotated[int, work_option("--repeats", help="Warm starts; there is one cold one.", min=1)] = 3,
    engine: EngineOptions,
    results: ResultOptions,
) -> int:
    """Time each stage from the start of a process: imports, loading, first token, and the two after it.

    The first start is cold: the files of torch, nanoserve and the model were dropped from the page cache before,
    as far as no other process holds them.

    [bold]Example[/bold]

      nanoserve bench startup -m dummy:smollm2-135m
    """
    from nanoserve.benchmarks.cpu_load import ForeignLoad
    from nanoserve.benchmarks.starting import drop_from_page_cache, library_directories, settle_elsewhere, start_once

    settings = engine.settings()
    report = results.open_report("startup", {"model": engine.model, "repeats": repeats, "engine": settings})
    report.put("operators", settle_elsewhere())
    with kept(report, lambda: _show(report, results)):
        for number in range(repeats + 1):
            temperature = "warm" if number else "cold"
            remark(f"starting a process, {temperature}")
            if not number:
                drop_from_page_cache([*library_directories(), *_model_files(engine)])
            foreign = ForeignLoad()
            start = start_once(engine.model, settings, engine.threads)
            row: dict[str, Any] = {"case": temperature, "stages": start.stages}
            row |= {"to_first_token": start.to_first_token, "foreign_cores": foreign.read()}
            report.add(row)
    return EXIT_OK


def _model_files(engine: EngineOptions) -> list[Path]:
    from nanoserve.models.hub import resolve_model

    directory = resolve_model(engine.model, offline=engine.offline).directory
    return [] if directory is None else [directory]


def _show(report: "Report", results: ResultOptions) -> None:
    from nanoserve.benchmarks.plots import plot_bars
    from nanoserve.benchmarks.starting import STAGES, TO_FIRST_TOKEN
    from nanoserve.benchmarks.tables import Column, print_table

    stages = [Column(name, f"stages.{name}", ".2f") for name in STAGES]
    total = Column("to first token", "to_first_token", ".2f")
    model = report.document["settings"]["model"] or "the bundled storyteller"
    title = f"seconds to start {model}, {report.document['operators'].partition(' (')[0]} operators"
    warm = [row["to_first_token"] for row in report.rows if row["case"] == "warm"]
    report.put("samples", {"warm": {"to_first_token_s": warm}})
    print_head(report)
    print_table(title, [Column("start", "case"), *stages, total], report.rows)
    if results.plot is not None:
        plot_bars(results.plot, title, "{case}", [*stages[: len(TO_FIRST_TOKEN)], total], report.rows)
