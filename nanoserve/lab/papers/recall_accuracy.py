"""The lecture's section 2.2.2: what small models recall of pairs of a key and a value, from runs
that ship with the package. scripts/train_recall.py made them."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, Note, Panel, panel
from nanoserve.lab.papers.claims import Claim, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.record.metrics import Spread

_DATA = Path(__file__).with_name("recall.csv")
_WHOLE = (
    *("seed", "parameters", "tokens", "seconds"),
    *("pairs", "nearest", "farthest", "questions", "right"),
)
"""Columns of whole numbers."""
Range = tuple[int, int]
"""The shortest and the longest distance from a pair to the question for it."""


class RecallAnswers(NamedTuple):
    """Questions with as many pairs at such distances to one model, and how many it answered
    right."""

    model: str
    seed: int
    parameters: int
    tokens: int
    seconds: int
    chance: float
    pairs: int
    nearest: int
    farthest: int
    questions: int
    right: int

    @property
    def distances(self) -> Range:
        return self.nearest, self.farthest


@cache
def shipped_answers() -> Sequence[RecallAnswers]:
    """Read the data that ships with the package."""
    with _DATA.open(encoding="utf-8", newline="") as table:
        return [_answered(row) for row in csv.DictReader(table)]


def _answered(row: Mapping[str, str]) -> RecallAnswers:
    values: dict[str, Any] = {name: int(row[name]) for name in _WHOLE}
    return RecallAnswers(model=row["model"], chance=float(row["chance"]), **values)


def accuracy(
    answers: Sequence[RecallAnswers], model: str, pairs: int, distances: Range | None = None
) -> Spread:
    """Percent of the questions to a model that are answered right, over its seeds; None: at all
    distances."""
    asked, right = dict[int, int](), dict[int, int]()
    for one in answers:
        if (one.model, one.pairs) == (model, pairs) and distances in (None, one.distances):
            asked[one.seed] = asked.get(one.seed, 0) + one.questions
            right[one.seed] = right.get(one.seed, 0) + one.right
    return Spread.of(100 * right[seed] / asked[seed] for seed in asked)


_STYLES = {"hybrid 1:7": "s-", "windows 1:5": "^--", "full attention": "o:"}
"""Lines that can be told apart where one lies on the other."""
RANGES = ((2, 8), (10, 16), (18, 32), (34, 46))
RECALL_COUNTED = (
    "from data of the package, made by `python scripts/train_recall.py --output DIR`: every model "
    "was trained once with each of 3 seeds; mean [lowest..highest]"
)
RECALL_COLUMNS = columns(
    ("", "model"),
    (",d", "parameters", "pairs"),
    ("", *((f"{nearest} to {farthest}", f"{nearest}") for nearest, farthest in RANGES)),
    ("", ("all distances", "all")),
)


def recall(scale: Scale, run: Run) -> Finding:
    """Section 2.2.2: answers that are right, by the number of pairs and the distance."""
    answers = shipped_answers()
    parameters = {one.model: one.parameters for one in answers}
    all_pairs = sorted({one.pairs for one in answers})
    rows: list[dict[str, Any]] = []
    for model, number in parameters.items():
        for pairs in all_pairs:
            by_range = {
                f"{near}": accuracy(answers, model, pairs, (near, far)) for near, far in RANGES
            }
            spreads = {**by_range, "all": accuracy(answers, model, pairs)}
            texts = {name: spread.text("{:.0f} %") for name, spread in spreads.items()}
            rows.append({"model": model, "parameters": number, "pairs": pairs, **texts})
    panels = [_panel(answers, tuple(parameters), pairs) for pairs in all_pairs]
    chart = Chart("Recall of a value by its key, trained alike", panels, columns=3)
    return Finding(_recall_claims(answers), chart, rows)


def _panel(answers: Sequence[RecallAnswers], models: Sequence[str], pairs: int) -> Panel:
    """Draw the accuracy of all models over distance, and chance."""
    heights = {
        model: [accuracy(answers, model, pairs, distances) for distances in RANGES]
        for model in models
    }
    chance = 100 * answers[0].chance
    title = f"{pairs} pairs"
    if pairs == 1:
        title = "1 pair"
    return panel(
        title,
        "tokens from a pair to its question",
        "answers that are right, %",
        [f"{nearest}-{farthest}" for nearest, farthest in RANGES],
        heights,
        styles=_STYLES,
        marks=(chance,),
        notes=(Note("chance", 0, chance, right=12, up=3),),
    )


def _recall_claims(answers: Sequence[RecallAnswers]) -> list[Claim]:
    """The claims of section 2.2.2, and what windows do (2.1.4), with the most pairs."""
    pairs = max(one.pairs for one in answers)
    farthest = RANGES[-1]

    def whole(model: str) -> Spread:
        return accuracy(answers, model, pairs)

    ours = {
        "2.2.2 S4D recall": whole("S4D"),
        "2.2.2 Mamba recall": whole("Mamba"),
        "2.2.2 hybrid recall": accuracy(answers, "hybrid 1:7", pairs, farthest),
        "2.1.4 windows recall": accuracy(answers, "windows 1:5", pairs, farthest),
        "2.2.2 full recall": whole("full attention"),
    }
    words = {
        "pairs": pairs,
        "nearest": farthest[0],
        "farthest": farthest[1],
        "chance": f"{100 * answers[0].chance:.0f} %",
    }
    return claims("lecture", ours, **words)
