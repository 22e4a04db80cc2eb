"""The lecture's section 2.2.3, counted: what it gains to write T tokens together in 20 denoising
steps, over one token a step; beside a block-diffusion storyteller, if its data ships with the
package."""

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.commands.tables import columns
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import Efficiency, load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.charts import Chart, ChartCurve, Note, Panel, panel
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.record.metrics import Spread
from nanoserve.scheduler.work import StepWork

_DATA = Path(__file__).with_name("diffusion.csv")
"""Timings of batches that two storytellers wrote in turn. Without the file, the figure is only
counted."""
MODEL, DEVICE = "llama-3.1-8b", "h100"
STEPS, TOKENS = 20, 256
"""Denoising steps, and the tokens that they write together: the lecture's example, and a canvas of
DiffusionGemma."""
BATCHES = (1, 2, 4, 8, 15, 16, 32, 64, 128, 256)
LENGTHS = (16, 32, 64, 128, 295, 512, 1024)


class Timing(NamedTuple):
    """A batch of sequences that a model wrote, one or several tokens a step."""

    model: str
    batch: int
    repeat: int
    tokens: int
    steps: int
    seconds: float


PLAIN, DIFFUSION = "storyteller", "block diffusion"
"""Models of the timings."""


@cache
def shipped_timings() -> Sequence[Timing]:
    """Read the data, if it ships with the package."""
    if not _DATA.exists():
        return ()
    with _DATA.open(encoding="utf-8", newline="") as table:
        return [_timing(row) for row in csv.DictReader(table)]


def _timing(row: Mapping[str, str]) -> Timing:
    return Timing(
        row["model"],
        batch=int(row["batch"]),
        repeat=int(row["repeat"]),
        tokens=int(row["tokens"]),
        steps=int(row["steps"]),
        seconds=float(row["seconds"]),
    )


DIFFUSION_COUNTED = (
    f"{MODEL} on an {DEVICE.upper()} at the full speed of its data sheet, without keys; "
    "measured rows, if there are any, from data of the package"
)
DIFFUSION_COLUMNS = columns(
    ("", "model"),
    (",d", ("sequences decoding", "batch")),
    ("", ("tokens a step", "tokens"), ("speedup: products alone", "closed_text")),
    ("", ("counted exactly, or measured", "text")),
)


def diffusion(scale: Scale, run: Run) -> Finding:
    """Section 2.2.3: the speedup over batches, and over the tokens that are written together."""
    costs = StepCosts(load_shape(MODEL), load_machine(DEVICE), efficiency=Efficiency.ideal())
    balance = costs.machine.device.intensity

    def exact(tokens: int) -> float:
        ends = costs.ends_seconds(StepWork(decodes=tokens, sampled=tokens), 0)
        return costs.layers_seconds(tokens, 0) + ends

    def closed(tokens: int) -> float:
        # products alone: their weights are read, or multiplied with
        return max(1.0, tokens / balance)

    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        found = {"closed": speedup(closed, batch), "exact": speedup(exact, batch)}
        texts = {"closed_text": f"{found['closed']:.2f}x", "text": f"{found['exact']:.2f}x"}
        tokens = f"{TOKENS / STEPS:.1f}"
        rows.append({"model": MODEL, "batch": batch, "tokens": tokens, **found, **texts})
    measured = measured_rows(shipped_timings())
    ours = {
        "2.2.3 one": speedup(closed, 1),
        "2.2.3 eight": speedup(closed, 8),
        "2.2.3 sixteen": speedup(closed, 16),
        "2.2.3 many": speedup(closed, 128),
        "2.2.3 pays": next(batch for batch in count(1) if speedup(closed, batch) < 1),
        "2.2.3 tokens": balance,
    }
    words = {f"exact_{batch}": f"{speedup(exact, batch):.2f}x" for batch in (1, 8, 16, 128)}
    panels = [_batch_panel(rows, measured, balance), _length_panel(closed)]
    title = f"Text diffusion in {STEPS} steps, {MODEL} on an {DEVICE.upper()}, counted"
    return Finding(
        claims("lecture", ours, **words), Chart(title, panels, columns=2), [*rows, *measured]
    )


def speedup(seconds: Callable[[int], float], batch: int, tokens: int = TOKENS) -> float:
    """Return how much sooner a batch is written: ``tokens`` steps of a token each, over STEPS that
    compute all of them, where a step of so many tokens takes these ``seconds``."""
    return tokens * seconds(batch) / (STEPS * seconds(batch * tokens))


def measured_rows(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Compare the tokens a second of both models, for each batch and turn, and count the tokens
    that a step gives each sequence."""
    rows: list[dict[str, Any]] = []
    for batch in sorted({one.batch for one in timings}):
        own = [one for one in timings if one.batch == batch]
        speeds = {(one.model, one.repeat): one.tokens / one.seconds for one in own}
        turns = [repeat for model, repeat in speeds if model == DIFFUSION]
        gained = Spread.of(speeds[DIFFUSION, turn] / speeds[PLAIN, turn] for turn in turns)
        diffused = [one for one in own if one.model == DIFFUSION]
        steps = sum(one.steps for one in diffused)
        tokens = sum(one.tokens for one in diffused) / (batch * steps)
        texts = {"closed_text": "-", "text": gained.text("{:.2f}x")}
        row = {"model": "storyteller, measured", "batch": batch, "tokens": f"{tokens:.1f}"}
        rows.append({**row, "measured": gained, **texts})
    return rows


def _batch_panel(
    rows: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]], balance: float
) -> Panel:
    """Draw the speedups over batches, and where they end."""
    batches = [float(row["batch"]) for row in rows]
    curves = [
        ChartCurve("products alone", batches, [row["closed"] for row in rows], style="--"),
        ChartCurve("counted exactly", batches, [row["exact"] for row in rows], style="o-"),
    ]
    if measured:
        spreads = [row["measured"] for row in measured]
        curves.append(
            ChartCurve(
                "storyteller, measured",
                [float(row["batch"]) for row in measured],
                [spread.mean for spread in spreads],
                [spread.low for spread in spreads],
                [spread.high for spread in spreads],
                "s:",
            )
        )
    ends = balance / STEPS
    return Panel(
        title=f"{TOKENS} tokens together",
        x="sequences decoding",
        y="speedup over a token a step",
        curves=curves,
        log_x=True,
        log_y=True,
        marks=(1.0,),
        vertical_marks=(ends,),
        notes=(Note(f"pays below {ends:.1f}", ends, 8.0, right=5),),
    )


def _length_panel(closed: Callable[[int], float]) -> Panel:
    """Draw the speedups over the tokens that are written together."""
    heights = {
        label: [speedup(closed, batch, tokens) for tokens in LENGTHS]
        for label, batch in (("1 sequence", 1), ("4", 4), ("8", 8), ("16", 16))
    }
    return panel(
        "products alone",
        "tokens together",
        "speedup over a token a step",
        [float(tokens) for tokens in LENGTHS],
        heights,
        log_x=True,
        log_y=True,
        marks=(1.0,),
    )
