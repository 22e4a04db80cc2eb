"""``nanoserve bench paper``: a paper's figures and claims, simulated, beside the paper's own
numbers."""

from pathlib import Path

from nanoserve.commands.options import argument, file_option, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import columns, print_table
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.charts import check_plotting, draw
from nanoserve.lab.commands.bench_options import (
    RESULTS_PANEL,
    JsonOptions,
    make_directory,
    print_head,
)
from nanoserve.lab.papers.framework import Paper, Scale, load_paper
from nanoserve.lab.papers.markdown import (
    CLAIM_COLUMNS,
    conditions,
    found_figures,
    to_markdown,
    verdict,
)
from nanoserve.lab.papers.running import Runner
from nanoserve.utils.files import replace_file

_ASSUMPTION = columns(("<", ("what it hangs on", "assumption")))


class PaperOptions(JsonOptions):
    name: str = argument(
        ..., "gllm, seesaw, apex, lecture (one device's accounting), or adaptive (ours).", "PAPER"
    )
    figure: str | None = option(None, "Only this figure; default: all.", metavar="NUMBER")
    seeds: int = option(3, "Runs of every simulation.", minimum=1, maximum=100)
    full: bool = option(False, "Larger runs, in more settings.")
    workers: int | None = option(
        None, "Processes; default: one for each core.", minimum=1, maximum=256
    )
    plot: Path | None = option(
        None,
        "Draw each figure into a PNG file in this directory.",
        metavar="DIR",
        panel=RESULTS_PANEL,
    )
    markdown: Path | None = file_option(
        "Write what was run, the claims and the tables to this page in Markdown.",
        panel=RESULTS_PANEL,
    )


def run(options: PaperOptions) -> None:
    """Simulated, counted, or measured on the bundled storyteller: no GPU and no paper's model is
    needed.

    [bold]Examples[/bold]

      nanoserve bench paper gllm --plot figures
      nanoserve bench paper gllm --figure 12 --seeds 1
      nanoserve bench paper lecture --markdown lecture.md
    """
    paper = load_paper(options.name)
    figures = paper.chosen(options.figure)
    check_plotting(options.plot)
    if options.plot is not None:
        make_directory(options.plot)
    scale = Scale(seeds=tuple(range(options.seeds)), full=options.full)
    settings = {
        "paper": options.name,
        "figure": options.figure,
        "seeds": options.seeds,
        "full": options.full,
    }
    settings["size"] = (len(figures) == 1 and figures[0].counted) or scale.pick(*paper.setting)
    with (
        options.reported(
            "paper", settings, lambda report, _: _show(report, paper, options.markdown)
        ) as report,
        show_progress() as progress,
        Runner(
            options.workers, lambda done, total: progress(f"figure {one.number}", done, total)
        ) as runner,
    ):
        # at once, for where it cannot be written no minutes should be spent
        _write_page(report, options.markdown)
        for one in figures:
            found = one.make(scale, runner.run)
            report.put(
                f"figure {one.number}",
                {"title": one.title, "rows": found.rows, "chart": found.chart},
            )
            for claim in found.claims:
                report.add({"case": f"{claim.figure}: {claim.says}", **claim.row()})
            if options.plot is not None and found.chart is not None:
                draw(found.chart, options.plot / f"{options.name}-{one.number}.png")


def _show(report: Report, paper: Paper, page: Path | None) -> str:
    document = report.document
    _write_page(report, page)
    print_head(report)
    print("\n".join(conditions(document, paper)))
    for figure in found_figures(document, paper):
        if figure.columns:
            rows = document[f"figure {figure.number}"]["rows"]
            print_table(f"{figure.number}: {figure.title}", figure.columns, rows)
    print_table(paper.title, [*CLAIM_COLUMNS, *_ASSUMPTION], report.rows, keys=2)
    return verdict(document)


def _write_page(report: Report, page: Path | None) -> None:
    if page is not None:
        replace_file(page, to_markdown(report.document))
