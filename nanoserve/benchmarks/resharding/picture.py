"""Phases and how full the KV cache is, over time (Seesaw, figures 2 and 6). Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.benchmarks.pipeline.picture import scheduler_of, trace_run, workers_of
from nanoserve.benchmarks.resharding.rounds import Variant
from nanoserve.benchmarks.resharding.running import ReshardRun
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.runtime.trace.phases import Phase
from nanoserve.runtime.trace.traced_moves import MovesTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"prefill": "#E69F00", "decode": "#56B4E9", "draining": "#999999", "re-sharding": "#CC79A7"}
"""Of Okabe and Ito's palette, which the colour-blind can tell apart."""
_POOL, _DEVICE = "#000000", "#D55E00"
_STRIP, _TOP = (103.0, 118.0), 122.0
"""Between which heights of the panel, whose lines end at 100 %, the phases are drawn, and where it ends."""

Shown = tuple[Variant, ReshardRun]


def plot_runs(path: Path, title: str, shown: Sequence[Shown]) -> None:
    """A panel for each run with two layouts: a strip of its phases, and below what share of the blocks is in use.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = titled_figure(title, 13, 1.2 + 2.5 * len(shown))
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (variant, run) in zip(panels, shown, strict=True):
        _draw(axes, variant, run)
    panels[-1].set(xlabel="seconds from the first arrival")
    handles: list[Artist] = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    handles.append(Line2D([], [], color=_POOL, linestyle="-", label="host pool in use"))
    handles.append(Line2D([], [], color=_DEVICE, linestyle="--", label="device blocks in use"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    save_figure(figure, path)


class RunKeeper:
    """Keeps the last run of each variant with two layouts to be drawn, and writes all runs into a trace.

    Args:
        file: of the trace; None writes none.
    """

    def __init__(self, file: ChromeTraceFile | None) -> None:
        self.last: dict[str, Shown] = {}  # by name
        self._file = file
        self._began: float | None = None

    def keep(self, variant: Variant, run: ReshardRun) -> None:
        """A run is done.

        Raises:
            RuntimeFailure: if it cannot be written.
        """
        if len(variant.place.layouts) == 2:
            self.last[variant.name] = variant, run
        if self._began is None:
            self._began = run.record.arrivals[0].arrival_time
        if self._file is not None:
            _trace(self._file, self._began, variant, run)


def _trace(file: ChromeTraceFile, began: float, variant: Variant, run: ReshardRun) -> None:
    """Write a run behind those before it, on tracks of its own."""
    layouts = variant.place.layouts
    moves = MovesTrace(
        file,
        began,
        layouts=[layout.name for layout in layouts],
        host_link_bandwidth=variant.place.host_link_bandwidth,
        scheduler=scheduler_of(variant.name),
        workers=workers_of(variant.name),
    )
    for phase in run.phases:
        moves.on_phase(phase)
    trace_run(file, began, variant.name, run, layouts[0].tensor_parallel if len(layouts) == 1 else None)
    for moment, state in run.states:
        moves.on_state(state, moment)
    for move in run.moves:
        moves.on_move(move)
    file.flush()


def _draw(axes: "Axes", variant: Variant, run: ReshardRun) -> None:
    began = run.record.arrivals[0].arrival_time
    for name, colour in _COLOURS.items():
        spans = [(phase.began - began, phase.seconds) for phase in run.phases if _kind(phase) == name]
        axes.broken_barh(spans, (_STRIP[0], _STRIP[1] - _STRIP[0]), color=colour, linewidth=0)
        axes.broken_barh(spans, (0, 100), color=colour, alpha=0.12, linewidth=0)
    times = [moment - began for moment, _ in run.states]
    device = [_percent(state.used_device_blocks, state.device_blocks) for _, state in run.states]
    pool = [_percent(state.used_host_blocks, state.host_blocks) for _, state in run.states]
    axes.step(times, device, "--", where="post", color=_DEVICE, linewidth=1)
    axes.step(times, pool, "-", where="post", color=_POOL, linewidth=1.4)
    transitions = sum(phase.kind == "reshard" for phase in run.phases)
    many = "1 transition" if transitions == 1 else f"{transitions} transitions"
    axes.set_title(f"{variant.name}: {run.outcome.makespan:,.1f} s, {many}")
    axes.set(ylabel="% of the blocks", ylim=(0, _TOP), yticks=range(0, 101, 25))
    axes.set_xlim(left=0)
    axes.grid(axis="y", alpha=0.3)


def _kind(phase: Phase) -> str:
    """A key of _COLOURS."""
    return {"drain": "draining", "reshard": "re-sharding"}.get(phase.kind) or ("decode" if phase.layout else "prefill")


def _percent(used: int, blocks: int) -> float:
    return 100 * used / blocks if blocks else 0.0
