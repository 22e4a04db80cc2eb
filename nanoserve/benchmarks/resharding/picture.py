"""Phases and how full the KV cache is, over time (Seesaw, figures 2 and 6). Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.benchmarks.variants import KeptRun
from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.record.phases import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"prefill": "#E69F00", "decode": "#56B4E9", "draining": "#999999", "re-sharding": "#CC79A7"}
"""Of Okabe and Ito's palette, which the colour-blind can tell apart."""
_POOL, _DEVICE = "#000000", "#D55E00"
_STRIP, _TOP = (103.0, 118.0), 122.0
"""Between which heights of the panel, whose lines end at 100 %, the phases are drawn, and where it ends."""


def plot_runs(path: Path, title: str, shown: Sequence[KeptRun]) -> None:
    """A panel for each run with two layouts: a strip of its phases, and below what share of the blocks is in use.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = [one for one in shown if len(one.layouts) == 2]
    figure = titled_figure(title, 13, 1.2 + 2.5 * len(drawn))
    panels = figure.subplots(len(drawn), 1, squeeze=False, sharex=True)[:, 0]
    for axes, one in zip(panels, drawn, strict=True):
        _draw(axes, one)
    panels[-1].set(xlabel="seconds from the first arrival")
    handles: list[Artist] = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    handles.append(Line2D([], [], color=_POOL, linestyle="-", label="host pool in use"))
    handles.append(Line2D([], [], color=_DEVICE, linestyle="--", label="device blocks in use"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    save_figure(figure, path)


def _draw(axes: "Axes", shown: KeptRun) -> None:
    record = shown.record
    began = record.arrivals[0].arrival_time
    for name, colour in _COLOURS.items():
        spans = [(phase.began - began, phase.seconds) for phase in record.phases if _kind(phase) == name]
        axes.broken_barh(spans, (_STRIP[0], _STRIP[1] - _STRIP[0]), color=colour, linewidth=0)
        axes.broken_barh(spans, (0, 100), color=colour, alpha=0.12, linewidth=0)
    times = [moment - began for moment, _ in record.blocks]
    device = [_percent(blocks.used_device, blocks.device) for _, blocks in record.blocks]
    pool = [_percent(blocks.used_host, blocks.host) for _, blocks in record.blocks]
    axes.step(times, device, "--", where="post", color=_DEVICE, linewidth=1)
    axes.step(times, pool, "-", where="post", color=_POOL, linewidth=1.4)
    transitions = sum(phase.kind == "reshard" for phase in record.phases)
    many = "1 transition" if transitions == 1 else f"{transitions} transitions"
    axes.set_title(f"{shown.name}: {record.makespan:,.1f} s, {many}")
    axes.set(ylabel="% of the blocks", ylim=(0, _TOP), yticks=range(0, 101, 25))
    axes.set_xlim(left=0)
    axes.grid(axis="y", alpha=0.3)


def _kind(phase: Phase) -> str:
    """A key of _COLOURS."""
    return {"drain": "draining", "reshard": "re-sharding"}.get(phase.kind) or ("decode" if phase.layout else "prefill")


def _percent(used: int, blocks: int) -> float:
    return 100 * used / blocks if blocks else 0.0
