"""The lecture's sections 2.1.1 and 2.1.2: what models with smaller caches lose, from runs that ship
with the package. scripts/train_kv_quality.py made them."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, ChartCurve, Panel
from nanoserve.lab.papers.attention_kinds import KINDS, LATENT, ROTATED
from nanoserve.lab.papers.claims import Claim, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.record.metrics import Spread

_DATA = Path(__file__).with_name("kv_quality.csv")
_WHOLE = ("seed", "parameters", "bytes_of_token", "tokens", "seconds")
"""Columns of whole numbers."""


class TrainedModel(NamedTuple):
    """A model with a kind of attention, and its loss on stories that it has not seen."""

    kind: str
    seed: int
    parameters: int
    bytes_of_token: int
    """Bytes of a token in the cache, in all layers."""
    tokens: int
    """Tokens that were read in training."""
    seconds: int
    """Processor time of training."""
    nats_per_byte: float


@cache
def shipped_models() -> Sequence[TrainedModel]:
    """Read the data that ships with the package."""
    with _DATA.open(encoding="utf-8", newline="") as table:
        return [_trained(row) for row in csv.DictReader(table)]


def _trained(row: Mapping[str, str]) -> TrainedModel:
    values: dict[str, Any] = {name: int(row[name]) for name in _WHOLE}
    return TrainedModel(kind=row["kind"], nats_per_byte=float(row["nats_per_byte"]), **values)


def losses(models: Sequence[TrainedModel], kind: str) -> Mapping[int, float]:
    """Validation losses of a kind in nats per byte, by seed."""
    return {one.seed: one.nats_per_byte for one in models if one.kind == kind}


def loss_ratio(models: Sequence[TrainedModel], kind: str, other: str) -> Spread:
    """The loss of a kind over that of another kind, seed by seed: both read the same texts in the
    same order."""
    ours, theirs = losses(models, kind), losses(models, other)
    return Spread.of(ours[seed] / theirs[seed] for seed in ours)


def differs(models: Sequence[TrainedModel], kind: str, other: str) -> bool:
    """Whether the losses of two kinds differ, on average, by more than either spreads over
    seeds."""
    ours, theirs = (Spread.of(losses(models, one).values()) for one in (kind, other))
    widest = max(ours.high - ours.low, theirs.high - theirs.low)
    return abs(ours.mean - theirs.mean) > widest


KV_QUALITY_COUNTED = (
    "from data of the package, made by `python scripts/train_kv_quality.py --data DIR --output "
    "DIR`: every model was trained once with each of 3 seeds; mean [lowest..highest]"
)
KV_QUALITY_COLUMNS = columns(
    ("", "kind"),
    (",d", "parameters", ("bytes of a token in the cache", "bytes_of_token")),
    ("", ("validation loss, nats per byte", "loss"), ("against MHA", "against")),
)


def kv_quality(scale: Scale, run: Run) -> Finding:
    """Sections 2.1.1 and 2.1.2: the loss of models with as many parameters, by their cache."""
    models = shipped_models()
    sizes = {one.kind: one for one in models}
    spreads = {kind: Spread.of(losses(models, kind).values()) for kind in KINDS}
    rows = [
        {
            "kind": kind,
            "parameters": sizes[kind].parameters,
            "bytes_of_token": sizes[kind].bytes_of_token,
            "loss": spreads[kind].text("{:.4f}"),
            "against": _against(models, kind),
        }
        for kind in KINDS
    ]
    curves = []
    for kind in KINDS:
        by_seed = losses(models, kind).values()
        places = [sizes[kind].bytes_of_token] * len(by_seed)
        curves.append(ChartCurve(kind, places, [*by_seed], style="o"))
    points = Panel(
        title=f"the same {models[0].tokens:,} tokens; a point for each seed",
        x="bytes of a token in the cache",
        y="validation loss, nats per byte",
        curves=curves,
        log_x=True,
        from_zero=False,
    )
    return Finding(_claims(models), Chart("Loss against the size of the cache", [points]), rows)


def _against(models: Sequence[TrainedModel], kind: str) -> str:
    """Say how the loss of a kind differs from multi-head attention's."""
    if kind == KINDS[0]:
        return "-"
    if not differs(models, kind, KINDS[0]):
        return "no difference beyond the seeds'"
    return loss_ratio(models, kind, KINDS[0]).text("{:.3f}x")


def _claims(models: Sequence[TrainedModel]) -> list[Claim]:
    ours = {
        "2.1.1 GQA loss": loss_ratio(models, "GQA", "MHA"),
        "2.1.1 MQA loss": loss_ratio(models, "MQA", "GQA"),
        "2.1.2 MLA loss": loss_ratio(models, "MLA", "GQA"),
    }
    return claims("lecture", ours, latent=LATENT, rotated=ROTATED)
