"""Throughput over the length of answers, for each KV limit (APEX, figure 7). Needs matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

from nanoserve.measures.charts import AnnotatedPanel, Chart, ChartCurve, draw

_MARKERS = "osv^Dx+*"


@dataclass(frozen=True, slots=True)
class Measured:
    """All rounds of a case."""

    share: float
    """Share of the KV memory that would hold everything."""
    output_tokens: int
    """Length of the answers."""
    throughputs: Mapping[str, Sequence[float]]
    """Output tokens per second of each variant, one value per round."""


def plot_throughputs(path: Path, title: str, measured: Sequence[Measured]) -> None:
    """A panel for each KV limit, a line for each variant: medians, with the range from the lowest to the highest round.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    ordered = sorted(measured, key=lambda case: case.output_tokens)
    shares = sorted({case.share for case in measured})
    top = 1.05 * max(value for case in measured for values in case.throughputs.values() for value in values)
    panels = [_panel(share, [case for case in ordered if case.share == share], top) for share in shares]
    draw(Chart(title, panels), path, panel_size=(4.4, 4.4))


def _panel(share: float, cases: Sequence[Measured], top: float) -> AnnotatedPanel:
    names = list(dict.fromkeys(name for case in cases for name in case.throughputs))
    curves = []
    for name, marker in zip(names, cycle(_MARKERS), strict=False):
        here = [case for case in cases if case.throughputs.get(name)]
        rounds = [case.throughputs[name] for case in here]
        middle, lows, highs = ([which(values) for values in rounds] for which in (median, min, max))
        curves.append(ChartCurve(name, [case.output_tokens for case in here], middle, lows, highs, style=f"{marker}-"))
    return AnnotatedPanel(
        title="KV memory for everything" if share >= 1 else f"KV memory for {share:.0%} of everything",
        x="output tokens of a request",
        y="output tokens per second",
        curves=curves,
        top=top,
    )
