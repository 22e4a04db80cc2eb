"""``nanoserve bench paper``: a paper's figures and claims, simulated, beside the paper's own numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanoserve.commands.bench_options import RESULTS_PANEL, WORK_PANEL, kept, make_directory, print_head, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import option, switch
from nanoserve.commands.progress import show_progress

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.papers.framework import Finding, Paper, PaperFigure


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOptions:
    """What is simulated, and how large."""

    figure: Annotated[str | None, work_option("--figure", help="Only this one; default: all.", metavar="NUMBER")] = None
    seeds: Annotated[int, work_option("--seeds", help="Runs of every simulation.", min=1, max=100)] = 3
    full: Annotated[bool, switch("--full", panel=WORK_PANEL, help="Larger runs, in more settings.", envvar=None)] = (
        False
    )
    workers: Annotated[
        int | None, work_option("--workers", help="Processes; default: one for each core.", min=1, max=256)
    ] = None


def paper(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PAPER", help="gllm, seesaw, apex, lecture (the accounting of one device), or adaptive (ours)."
        ),
    ],
    *,
    runs: PaperOptions,
    json_file: Annotated[
        Path | None,
        option("--json", panel=RESULTS_PANEL, help="Write all figures to this file.", metavar="FILE", envvar=None),
    ] = None,
    plot: Annotated[
        Path | None,
        option(
            "--plot",
            panel=RESULTS_PANEL,
            help="Draw each figure into a PNG file in this directory.",
            metavar="DIR",
            envvar=None,
        ),
    ] = None,
) -> int:
    """Simulate a paper's figures and put what it claims beside what comes out.

    [bold]Examples[/bold]

      nanoserve bench paper gllm --plot figures
      nanoserve bench paper gllm --figure 12 --seeds 1
      nanoserve bench paper lecture
    """
    from nanoserve.benchmarks.report import Report
    from nanoserve.measures.figures import check_plotting
    from nanoserve.papers.charts import draw
    from nanoserve.papers.framework import Scale, load_paper
    from nanoserve.papers.running import Runner

    chosen = load_paper(name)
    figures = chosen.chosen(runs.figure)
    check_plotting(plot)
    if plot is not None:
        make_directory(plot)
    scale = Scale(seeds=tuple(range(runs.seeds)), full=runs.full)
    settings = {"paper": name, "figure": runs.figure, "seeds": runs.seeds, "full": runs.full}
    settings |= {"size": scale.pick(*chosen.setting)}
    report = Report("paper", settings, json_file)
    findings: dict[str, Finding] = {}
    with (
        kept(report, lambda: _show(report, chosen, findings)),
        show_progress() as progress,
        Runner(runs.workers, lambda done, total, _: progress(f"figure {one.number}", done, total)) as runner,
    ):
        for one in figures:
            found = findings[one.number] = one.make(scale, runner.run)
            _keep(report, one, found)
            if plot is not None and found.chart is not None:
                draw(found.chart, plot / f"{name}-{one.number}.png")
    return EXIT_OK


def _keep(report: "Report", figure: "PaperFigure", found: "Finding") -> None:
    report.put(f"figure {figure.number}", {"title": figure.title, "rows": found.rows, "chart": found.chart})
    for claim in found.claims:
        report.add({"case": f"{claim.figure}: {claim.says}", **claim.row()})


def _show(report: "Report", paper: "Paper", findings: "Mapping[str, Finding]") -> None:
    from nanoserve.benchmarks.tables import Column, print_table

    settings = report.document["settings"]
    print_head(report)
    runs = f"{settings['seeds']} " if paper.spread_over == "seeds" else ""
    print(f"{settings['size']}; mean [lowest..highest] over {runs}{paper.spread_over}")
    for figure in paper.figures:
        found = findings.get(figure.number)
        if found is not None and found.columns:
            print_table(f"{figure.number}: {figure.title}", found.columns, found.rows)
    columns = [
        Column("figure", "figure"),
        Column("claim", "says", justify="left"),
        Column("paper", "paper"),
        Column("here", "ours_text"),
        Column("asked", "bounds"),
        Column("holds", "verdict"),
        Column("what it hangs on", "assumption", justify="left"),
    ]
    print_table(paper.title, columns, report.rows, keys=2)
