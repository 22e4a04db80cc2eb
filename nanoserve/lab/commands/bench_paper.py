"""``nanoserve bench paper``: a paper's figures and claims, simulated, beside the paper's own numbers."""

from collections.abc import Mapping
from pathlib import Path

from nanoserve.commands.options import argument, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import columns, print_table
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.charts import check_plotting, draw
from nanoserve.lab.commands.bench_options import RESULTS_PANEL, JsonOptions, make_directory, print_head
from nanoserve.lab.papers.framework import Finding, Paper, Scale, load_paper
from nanoserve.lab.papers.running import Runner

_CLAIM_COLUMNS = columns(
    ("", "figure"),
    ("<", ("claim", "says")),
    ("", "paper", ("here", "ours_text"), ("asked", "bounds"), ("holds", "verdict")),
    ("<", ("what it hangs on", "assumption")),
)


class PaperOptions(JsonOptions):
    name: str = argument(..., "gllm, seesaw, apex, lecture (one device's accounting), or adaptive (ours).", "PAPER")
    figure: str | None = option(None, "Only this one; default: all.", metavar="NUMBER")
    seeds: int = option(3, "Runs of every simulation.", minimum=1, maximum=100)
    full: bool = option(False, "Larger runs, in more settings.")
    workers: int | None = option(None, "Processes; default: one for each core.", minimum=1, maximum=256)
    plot: Path | None = option(
        None, "Draw each figure into a PNG file in this directory.", metavar="DIR", panel=RESULTS_PANEL
    )


def run(options: PaperOptions) -> None:
    """Simulated, counted, or measured on the bundled storyteller: no GPU and no paper's model is needed.

    [bold]Examples[/bold]

      nanoserve bench paper gllm --plot figures
      nanoserve bench paper gllm --figure 12 --seeds 1
      nanoserve bench paper lecture
    """
    paper = load_paper(options.name)
    figures = paper.chosen(options.figure)
    check_plotting(options.plot)
    if options.plot is not None:
        make_directory(options.plot)
    scale = Scale(seeds=tuple(range(options.seeds)), full=options.full)
    settings = {"paper": options.name, "figure": options.figure, "seeds": options.seeds, "full": options.full}
    settings["size"] = (len(figures) == 1 and figures[0].counted) or scale.pick(*paper.setting)
    findings: dict[str, Finding] = {}
    with (
        options.reported("paper", settings, lambda report, _: _show(report, paper, findings)) as report,
        show_progress() as progress,
        Runner(options.workers, lambda done, total: progress(f"figure {one.number}", done, total)) as runner,
    ):
        for one in figures:
            found = findings[one.number] = one.make(scale, runner.run)
            report.put(f"figure {one.number}", {"title": one.title, "rows": found.rows, "chart": found.chart})
            for claim in found.claims:
                report.add({"case": f"{claim.figure}: {claim.says}", **claim.row()})
            if options.plot is not None and found.chart is not None:
                draw(found.chart, options.plot / f"{options.name}-{one.number}.png")


def _show(report: Report, paper: Paper, findings: Mapping[str, Finding]) -> str:
    settings = report.document["settings"]
    print_head(report)
    found_figures = [figure for figure in paper.figures if figure.number in findings]
    counted = [f"figure {figure.number}: {figure.counted}" for figure in found_figures if figure.counted]
    if len(counted) < len(found_figures):
        runs = f"{settings['seeds']} " if paper.spread_over == "seeds" else ""
        counted.insert(0, f"{settings['size']}; mean [lowest..highest] over {runs}{paper.spread_over}")
    print("\n".join(counted))
    for figure in found_figures:
        found = findings[figure.number]
        if figure.columns:
            print_table(f"{figure.number}: {figure.title}", figure.columns, found.rows)
    print_table(paper.title, _CLAIM_COLUMNS, report.rows, keys=2)
    holding = sum(row["holds"] != "no" for row in report.rows)
    share = f"{holding} of {len(report.rows)} claims hold ({holding / len(report.rows):.0%})"
    return f"{share}, each over {settings['seeds']} {paper.spread_over} that all count."
