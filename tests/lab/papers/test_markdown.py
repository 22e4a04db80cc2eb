"""The page of a run: made of its JSON alone, and those in docs/results have each claim of their
paper, and no other."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve.commands.tables import columns, escaped
from nanoserve.lab.papers.claims import Claim, read_bounds, stated_claims
from nanoserve.lab.papers.framework import Finding, Paper, PaperFigure, load_paper
from nanoserve.lab.papers.markdown import to_markdown
from nanoserve.record.metrics import Spread

PAGES = sorted((Path(nanoserve.__file__).parents[1] / "docs" / "results").glob("paper-*.md"))
_NO_FINDING = Finding()
TINY = Paper(
    title="Tiny: a paper of three figures",
    setting=("10 requests", "100 requests"),
    figures=(
        PaperFigure(
            number="1",
            title="speed",
            make=lambda scale, run: _NO_FINDING,
            columns=columns(("", "system"), (",.1f", ("tok/s", "rate")), ("<", "remark")),
        ),
        PaperFigure(
            number="2",
            title="answers",
            make=lambda scale, run: _NO_FINDING,
            counted="4 stories for each seed",
            columns=columns(("", "drafter"), ("d", "kept")),
            measured=True,
        ),
        PaperFigure(number="3", title="a picture", make=lambda scale, run: _NO_FINDING),
        PaperFigure(
            number="4",
            title="what was not asked for",
            make=lambda scale, run: _NO_FINDING,
            columns=columns(("", "x")),
        ),
    ),
)


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the tiny paper with three of its figures, and return the document of ``--json``."""
    monkeypatch.setattr("nanoserve.lab.papers.markdown.load_paper", {"tiny": TINY}.__getitem__)
    shared = {"paper": "2x", "bounds": "at least 1.5x"}
    return {
        "schema": "nanoserve-bench/1",
        "kind": "paper",
        "complete": True,
        "started": "2026-01-02T03:04:05+00:00",
        "command": "nanoserve bench paper tiny --json /somewhere/tiny.json",
        "commit": "0123456789ab",
        "machine": {
            "processor": "A CPU",
            "cores": 2,
            "memory_gib": 23.5,
            "system": "Linux 6.1 x86_64",
        },
        "versions": {"nanoserve": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu"},
        "settings": {
            "paper": "tiny",
            "figure": None,
            "seeds": 2,
            "full": False,
            "size": "10 requests",
        },
        "rows": [
            {
                "figure": "1",
                "says": "a|b is faster",
                "ours_text": "1.90x [1.80x..2.00x]",
                "holds": "yes",
                "verdict": "yes",
                "assumption": "long answers",
                **shared,
            },
            {
                "figure": "1",
                "says": "c is faster",
                "ours_text": "1.00x",
                "holds": "no",
                "verdict": "no",
                "assumption": "needs *much* memory",
                **shared,
            },
            {
                "figure": "2",
                "says": "d is faster",
                "ours_text": "3.50x",
                "holds": "mostly",
                "verdict": "mostly, 1.8x off",
                "assumption": "long answers",
                **shared,
            },
        ],
        "notes": [],
        "figure 1": {
            "title": "speed",
            "rows": [
                {"system": "ours", "rate": 1234.56, "remark": "best"},
                {"system": "theirs", "rate": 9},
            ],
            "chart": None,
        },
        "figure 2": {"title": "answers", "rows": [{"drafter": "ngram", "kept": 3}], "chart": None},
        "figure 3": {"title": "a picture", "rows": [{"number": 1}], "chart": None},
    }


HEAD = """\
# Tiny: a paper of three figures

Reduced size: `nanoserve bench paper tiny --seeds 2`, nanoserve 0.1.0, commit 0123456789ab, 2026-01-02.

* 10 requests; mean [lowest..highest] over up to 2 seeds
* figure 2: 4 stories for each seed

Measured on A CPU, 2 cores, 23.5 GiB, Linux 6.1 x86_64, torch 2.13.0+cpu: figure 2.

**2 of 3 claims hold (67%), over up to 2 seeds; all runs count.**

## Claims

"""
TABLES = r"""
| figure | claim | paper | here | asked | holds | hangs on |
| --- | --- | --- | --- | --- | --- | ---: |
| 1 | a\|b is faster | 2x | 1.90x [1.80x..2.00x] | at least 1.5x | yes | 1 |
| 1 | c is faster | 2x | 1.00x | at least 1.5x | no | 2 |
| 2 | d is faster | 2x | 3.50x | at least 1.5x | mostly, 1.8x off | 1 |

What these numbers hang on most; where a claim does not hold, what it would take:

1. long answers
2. needs \*much\* memory

## Figure 1: speed

| system | tok/s | remark |
| --- | ---: | --- |
| ours | 1,234.6 | best |
| theirs | 9.0 |  |

## Figure 2: answers

| drafter | kept |
| --- | ---: |
| ngram | 3 |
"""


def test_a_run_is_a_page(document: dict[str, Any]) -> None:
    page = to_markdown(document)
    assert page.startswith(HEAD)
    assert page.endswith(TABLES)
    legend = page.removeprefix(HEAD).removesuffix(TABLES)
    assert legend.count("\n") == 1, "one paragraph says how the table is read"


def test_nothing_measured_names_no_machine(document: dict[str, Any]) -> None:
    del document["figure 2"]
    page = to_markdown(document)
    assert "A CPU" not in page
    assert "figure 2" not in page.lower()


def test_one_seed_is_said_to_be_one(document: dict[str, Any]) -> None:
    document["settings"]["seeds"] = 1
    assert ", over one seed; all runs count" in to_markdown(document)


def test_a_part_at_full_size_names_its_command(document: dict[str, Any]) -> None:
    document["settings"] |= {"figure": "1", "full": True}
    assert "\nFull size: `nanoserve bench paper tiny --figure 1 --seeds 2 --full`, " in to_markdown(
        document
    )


def test_what_was_interrupted_says_so(document: dict[str, Any]) -> None:
    document |= {"complete": False, "rows": []}
    page = to_markdown(document)
    assert "\n**Not complete: the run was interrupted, or goes on.**\n" in page
    assert "## Claims" not in page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_in_the_docs_has_each_claim_of_its_paper(page: Path) -> None:
    """Compares with claims.csv: what has changed there since the page was written is found."""
    name = page.stem.split("-")[1]
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {load_paper(name).title}\n")
    assert "**Not complete" not in text
    assert ("--full`" in text) == page.stem.endswith("-full")
    remaining = [row for (of, _), row in stated_claims().items() if of == name]
    for shown in claims_of(text):
        same = [row for row in remaining if is_of(row, shown)]
        assert same, f"not in claims.csv: {shown}"
        remaining.remove(same[0])
    assert not remaining


def claims_of(text: str) -> Iterator[dict[str, str]]:
    """The rows of a page's claims table, each with its assumption, escapes and all."""
    assumptions = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    (table,) = re.findall(r"^\| figure \| claim .*\n\|[- :|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    for line in table.splitlines():
        figure, says, paper, _, asked, _, number = re.split(r"(?<!\\) *\| *", line.strip("| "))
        yield {
            "figure": figure,
            "says": says,
            "paper": paper,
            "asked": asked,
            "assumption": assumptions[number],
        }


def is_of(row: Mapping[str, str], shown: Mapping[str, str]) -> bool:
    """Whether a row of claims.csv, in which words in braces stand for what a run fills in, is what
    the page shows."""
    texts = dict(row)
    if "{" not in row["asked"]:
        form, low, high = read_bounds(row["asked"])
        claim = Claim(
            figure="",
            says="",
            paper="",
            ours=Spread.of([0.0]),
            form=row["form"] or form,
            at_least=low,
            at_most=high,
            assumption="",
        )
        texts["asked"] = claim.bounds
    return all(
        re.fullmatch(
            ".+".join(map(re.escape, re.split(r"\{[^}]*\}", escaped(texts[field])))), shown[field]
        )
        for field in shown
    )
