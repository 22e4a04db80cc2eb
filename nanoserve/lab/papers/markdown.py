"""A run of ``nanoserve bench paper`` as a page in Markdown, made of nothing but the document that
``--json`` writes.

How its numbers are shown (titles, columns) is said by the paper's figures, so that a document that
was kept makes the same page as the run itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanoserve.commands.tables import columns, escaped, markdown_table
from nanoserve.lab.benchmarks.machine import machine_text
from nanoserve.lab.papers.framework import Paper, PaperFigure, load_paper

Document = Mapping[str, Any]
CLAIM_COLUMNS = columns(
    ("", "figure"),
    ("<", ("claim", "says")),
    ("", "paper", ("here", "ours_text"), ("asked", "bounds"), ("holds", "verdict")),
)
"""How a claim is shown, but for what it hangs on."""
_NUMBERED = columns(("d", ("hangs on", "number")))
_LEGEND = (
    "*Here* is the mean, with the lowest and the highest value where they differ. *Asked* are "
    "bounds of nanoserve's "
    "own. A claim *holds* if every value lies within them, and mostly if only the mean does. Where "
    "it holds but *here* "
    "is far from the paper's number, the factor stands beside it. *Hangs on* is a number of the "
    "list below the table."
)


def to_markdown(document: Document) -> str:
    """Write what was run, how many claims hold, the claims, and a table for each figure that has
    one."""
    paper = load_paper(document["settings"]["paper"])
    figures = found_figures(document, paper)
    blocks = [f"# {paper.title}", *_head(document, paper, figures)]
    if document["rows"]:
        blocks += [f"**{verdict(document)}**", "## Claims", _LEGEND, *_claims(document["rows"])]
    for figure in figures:
        if figure.columns:
            rows = document[f"figure {figure.number}"]["rows"]
            blocks += [
                f"## Figure {figure.number}: {figure.title}",
                markdown_table(figure.columns, rows),
            ]
    return "\n\n".join(blocks) + "\n"


def found_figures(document: Document, paper: Paper) -> list[PaperFigure]:
    """The figures that the run has made, in the paper's order."""
    return [figure for figure in paper.figures if f"figure {figure.number}" in document]


def conditions(document: Document, paper: Paper) -> list[str]:
    """How large the runs were and what the spread goes over, and a line for each figure that is not
    of such runs."""
    settings, figures = document["settings"], found_figures(document, paper)
    counted = [f"figure {figure.number}: {figure.counted}" for figure in figures if figure.counted]
    if len(counted) == len(figures):
        return counted
    return [f"{settings['size']}; mean [lowest..highest] over {_runs(document, paper)}", *counted]


def verdict(document: Document) -> str:
    """How many claims hold, and over how many runs."""
    rows, paper = document["rows"], load_paper(document["settings"]["paper"])
    holding = sum(row["holds"] != "no" for row in rows)
    share = f"{holding} of {len(rows)} claims hold ({holding / len(rows):.0%})"
    return f"{share}, over {_runs(document, paper)}; all runs count."


def _runs(document: Document, paper: Paper) -> str:
    """How many runs the spread of a claim goes over: "up to 3 seeds", as some figures are of the
    first one."""
    if paper.spread_over != "seeds":
        return paper.spread_over
    seeds: int = document["settings"]["seeds"]
    return "one seed" if seeds == 1 else f"up to {seeds} seeds"


def _head(document: Document, paper: Paper, figures: Sequence[PaperFigure]) -> Iterator[str]:
    settings = document["settings"]
    size = "Full" if settings["full"] else "Reduced"
    version, day = document["versions"]["nanoserve"], document["started"].partition("T")[0]
    yield (
        f"{size} size: `{_command(settings)}`, nanoserve {version}, commit {document['commit']}, "
        f"{day}."
    )
    if not document["complete"]:
        yield "**Not complete: the run was interrupted, or goes on.**"
    if lines := conditions(document, paper):
        yield "\n".join(f"* {line}" for line in lines)
    if measured := [f"figure {figure.number}" for figure in figures if figure.measured]:
        torch = document["versions"].get("torch")
        yield (
            f"Measured on {machine_text(document['machine'])}, torch {torch}: "
            f"{', '.join(measured)}."
        )


def _command(settings: Mapping[str, Any]) -> str:
    """The command that makes the run again, without the files that it wrote."""
    words = ["nanoserve bench paper", settings["paper"]]
    if settings["figure"] is not None:
        words.append(f"--figure {settings['figure']}")
    words.append(f"--seeds {settings['seeds']}")
    if settings["full"]:
        words.append("--full")
    return " ".join(words)


def _claims(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The claims, each with the number of its assumption in the list below them, for many share
    one."""
    assumptions = list(dict.fromkeys(row["assumption"] for row in rows))
    numbered = [{**row, "number": assumptions.index(row["assumption"]) + 1} for row in rows]
    yield markdown_table([*CLAIM_COLUMNS, *_NUMBERED], numbered)
    yield "What these numbers hang on most; where a claim does not hold, what it would take:"
    yield "\n".join(
        f"{number}. {escaped(text)}" for number, text in enumerate(assumptions, start=1)
    )
