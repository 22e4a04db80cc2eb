"""Throughput over the length of answers, for each KV limit (APEX, figure 7). Needs matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nanoserve.measures.figures import save_figure, titled_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#0072B2", "#F0E442")
"""Colours from Okabe and Ito's palette, which the colour-blind can tell apart."""
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
    """A panel for each KV limit, a line for each variant: medians, with bars from the lowest to the highest round.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    limits = [list(group) for _, group in groupby(sorted(measured, key=attrgetter("share")), attrgetter("share"))]
    figure = titled_figure(title, 1.2 + 4.2 * len(limits), 4.8)
    panels = figure.subplots(1, len(limits), squeeze=False, sharey=True)[0]
    for panel, cases in zip(panels, limits, strict=True):
        _draw(panel, sorted(cases, key=attrgetter("output_tokens")))
    panels[0].set_ylim(bottom=0)  # applies to all panels; only now, because the limits stop growing with the data
    panels[0].set_ylabel("output tokens per second")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    save_figure(figure, path)


def _draw(panel: "Axes", cases: Sequence[Measured]) -> None:
    names = list(dict.fromkeys(name for case in cases for name in case.throughputs))
    for name, colour, marker in zip(names, cycle(_COLOURS), cycle(_MARKERS), strict=False):
        here = [case for case in cases if case.throughputs.get(name)]
        values = [sorted(case.throughputs[name]) for case in here]
        medians = [median(found) for found in values]
        spread = [
            [middle - found[0] for middle, found in zip(medians, values, strict=True)],
            [found[-1] - middle for middle, found in zip(medians, values, strict=True)],
        ]
        outputs = [case.output_tokens for case in here]
        panel.errorbar(outputs, medians, spread, color=colour, marker=marker, capsize=3, linewidth=1.5, label=name)
    share = cases[0].share
    panel.set_title("KV memory for everything" if share >= 1 else f"KV memory for {share:.0%} of everything")
    panel.set_xlabel("output tokens of a request")
    panel.set_xticks([case.output_tokens for case in cases])
    panel.margins(x=0.08)
    panel.grid(axis="y", alpha=0.3)
