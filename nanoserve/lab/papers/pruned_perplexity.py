"""The lecture's section 2.4: the storyteller's perplexity without its least important parts, before
and after healing, and that of the same shape from random weights. The data ships with the package;
scripts/train_pruning.py made it."""

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

_DATA = Path(__file__).with_name("pruning.csv")
_HEALED = "feed-forward 384 of 768"
"""The model that was healed, and whose shape was trained from random weights."""


class PrunedPerplexity(NamedTuple):
    """A model, and how it was trained."""

    model: str
    importance: str
    """The measure by which parts were ranked; "none" for random weights."""
    training: str
    seed: int
    parameters: int
    tokens: int
    """Tokens of training."""
    seconds: int
    """Processor time of training."""
    perplexity: float


@cache
def shipped_perplexities() -> Sequence[PrunedPerplexity]:
    """Read the data that ships with the package."""
    with _DATA.open(encoding="utf-8", newline="") as table:
        return [_perplexity(row) for row in csv.DictReader(table)]


def _perplexity(row: Mapping[str, str]) -> PrunedPerplexity:
    whole: dict[str, Any] = {
        name: int(row[name]) for name in ("seed", "parameters", "tokens", "seconds")
    }
    return PrunedPerplexity(
        model=row["model"],
        importance=row["importance"],
        training=row["training"],
        perplexity=float(row["perplexity"]),
        **whole,
    )


PRUNING_COUNTED = (
    "from data of the package, made by `python scripts/train_pruning.py --data DIR --output DIR`: "
    "what has a seed was made with each of 3; perplexity is a mean [lowest..highest], tokens and "
    "minutes of processor time are means"
)
PRUNING_COLUMNS = columns(
    ("", "model", "importance", "training"),
    (",d", "parameters"),
    (",.0f", "tokens"),
    (".1f", "minutes"),
    ("", ("perplexity", "text")),
)
_TRAININGS = {
    "none": "none",
    "distilled": "distilled",
    "next tokens": "equal tokens",
    "next tokens, equal time": "equal minutes",
}
"""The trainings as the table names them. Random weights learn the next tokens of texts."""
_POINTS = {
    ("activation", "none"): "trimmed",
    ("activation", "distilled"): "trimmed, distilled",
    ("none", "distilled"): "random weights, distilled",
    ("none", "next tokens"): "random weights, equal tokens",
    ("none", "next tokens, equal time"): "random weights, equal minutes",
}
"""Points of the second panel, by importance and training."""


def pruning(scale: Scale, run: Run) -> Finding:
    """Section 2.4: perplexity by what is left out and how that was chosen, and after training."""
    by_kind = dict[tuple[str, str, str], list[PrunedPerplexity]]()
    for one in shipped_perplexities():
        by_kind.setdefault((one.model, one.importance, one.training), []).append(one)
    perplexities = {
        kind: Spread.of(one.perplexity for one in models) for kind, models in by_kind.items()
    }
    rows: list[dict[str, Any]] = []
    for kind, models in by_kind.items():
        model, importance, training = kind
        if training != "none" and importance == "none":
            importance = "random weights"
        rows.append(
            {
                "model": model,
                "importance": importance,
                "training": _TRAININGS[training],
                "parameters": models[0].parameters,
                "tokens": sum(one.tokens for one in models) / len(models),
                "minutes": sum(one.seconds for one in models) / len(models) / 60,
                "text": perplexities[kind].text("{:.1f}"),
            }
        )
    panels = [_cut_panel(perplexities), _trained_panel(perplexities)]
    chart = Chart("The storyteller without its least important parts", panels, columns=1)
    return Finding(_pruning_claims(perplexities, by_kind), chart, rows)


Perplexities = Mapping[tuple[str, str, str], Spread]
"""By model, importance and training."""


def _whole(perplexities: Perplexities) -> float:
    return perplexities["whole", "none", "none"].mean


def _cut_panel(perplexities: Perplexities) -> Panel:
    """Draw what is left, before any training."""
    models = list(
        dict.fromkeys(model for model, importance, _ in perplexities if importance == "activation")
    )
    heights = {
        importance: [perplexities[model, importance, "none"].mean for model in models]
        for importance in ("activation", "magnitude", "random")
    }
    whole = _whole(perplexities)
    return panel(
        "trimmed, by importance; mean over seeds",
        "what is left",
        "perplexity",
        models,
        heights,
        styles="o",
        log_y=True,
        marks=(whole,),
        notes=(Note("whole model", 0, whole, right=12, up=6),),
    )


def _trained_panel(perplexities: Perplexities) -> Panel:
    """Draw one shape: trimmed, healed, and trained from random weights."""
    heights = [perplexities[_HEALED, *kind].mean for kind in _POINTS]
    whole = _whole(perplexities)
    return panel(
        f"{_HEALED}; mean over seeds",
        "before and after training",
        "perplexity",
        list(_POINTS.values()),
        {"": heights},
        styles="o",
        log_y=True,
        marks=(whole,),
        notes=(Note("whole model", 0, whole, right=12, up=6),),
    )


def _pruning_claims(
    perplexities: Perplexities, by_kind: Mapping[tuple[str, str, str], Sequence[PrunedPerplexity]]
) -> list[Claim]:
    """The claims of section 2.4, each as a perplexity over another."""

    def over(kind: tuple[str, str], other: tuple[str, str]) -> Spread:
        """The perplexity of one kind of the healed shape over that of another, seed by seed."""
        bases = {one.seed: one.perplexity for one in by_kind[_HEALED, *other]}
        ratios = []
        for one in by_kind[_HEALED, *kind]:
            base = bases.get(one.seed, perplexities[_HEALED, *other].mean)
            ratios.append(one.perplexity / base)
        return Spread.of(ratios)

    trimmed, healed = ("activation", "none"), ("activation", "distilled")
    whole = _whole(perplexities)
    own = by_kind[_HEALED, *healed]
    ours = {
        "2.4.1 random": over(("random", "none"), trimmed),
        "2.4.1 magnitude": over(("magnitude", "none"), trimmed),
        "2.4.1 healed": Spread.of(one.perplexity / whole for one in own),
        "2.4.1 equal tokens": over(("none", "next tokens"), healed),
        "2.4.1 equal minutes": over(("none", "next tokens, equal time"), healed),
        "2.4.1 distilled": over(("none", "distilled"), healed),
    }
    words = {
        "tokens": f"{own[0].tokens:,}",
        "trimmed": f"{perplexities[_HEALED, *trimmed].mean:.1f}",
        "whole": f"{whole:.1f}",
    }
    return claims("lecture", ours, **words)
