"""What a comparison shows: stages at work, phases and full KV caches, and throughput. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from itertools import cycle, groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nanoserve.benchmarks.policies.rounds import Bench, Run
from nanoserve.measures.figures import save_figure, titled_figure
from nanoserve.record.bubbles import stage_shares
from nanoserve.record.phases import Phase
from nanoserve.record.run_record import RunRecord
from nanoserve.record.window import StepWindow
from nanoserve.simulator.plots import add_legend, draw_stages, draw_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PHASES = {"prefill": "#E69F00", "decode": "#56B4E9", "draining": "#999999", "re-sharding": "#CC79A7"}
_POOL, _DEVICE = "#000000", "#D55E00"
_LINES = ("#000000", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#D55E00", "#0072B2", "#F0E442")
"""Colours from Okabe and Ito's palette, which the colour-blind can tell apart."""
_MARKERS = "osv^Dx+*"
_STRIP, _TOP = (103.0, 118.0), 122.0
"""Between which heights of the panel, whose lines end at 100 %, the phases are drawn, and where it ends."""


def plot_stages(path: Path, title: str, runs: Mapping[str, Run]) -> None:
    """A row for each run: some consecutive micro-batches on their way through the stages, and the tokens of all (gLLM,
    figure 1).

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    figure = titled_figure(title, 15, 1.2 + 2.7 * len(runs))
    shares = {name: stage_shares(run.record, run.variant.layouts[0].tensor_parallel) for name, run in runs.items()}
    panels = figure.subplot_mosaic(
        [[f"stages of {name}" if shares[name] else name, name] for name in runs]  # without stages, tokens fill the row
    )
    most = max(one.decodes + one.prompt_tokens for run in runs.values() for one in run.record.planned.values())
    for name, run in runs.items():
        if found := shares[name]:
            idle = sum(share.bubbles for share in found) / len(found)
            heading = f"{name}: which micro-batch is where; stages idle for {idle:.0%}"
            draw_stages(panels[f"stages of {name}"], _window(run), heading)
        tokens = panels[name]
        draw_tokens(tokens, [(step, one.decodes, one.prompt_tokens) for step, one in run.record.planned.items()])
        tokens.set(title=f"{name}: tokens of each micro-batch", xlabel="micro-batch", ylim=(0, most * 1.05))
        tokens.locator_params(axis="x", integer=True)
    add_legend(figure)
    save_figure(figure, path)


def _window(run: Run) -> StepWindow:
    """Where each stage's device worked on each plan, in seconds from the first arrival on."""
    record = run.record
    window = StepWindow(record.arrivals[0].arrival_time)
    stages = record.stages(run.variant.layouts[0].tensor_parallel)
    for planned, *times in zip(record.planned.values(), *stages, strict=True):
        window.on_step(planned, times)
    return window


def plot_phases(path: Path, title: str, runs: Mapping[str, Run]) -> None:
    """A panel for each run with two layouts: a strip of its phases above the share of blocks in use (Seesaw, figures 2
    and 6).

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {name: run.record for name, run in runs.items() if len(run.variant.layouts) == 2}
    figure = titled_figure(title, 13, 1.2 + 2.5 * len(drawn))
    panels = figure.subplots(len(drawn), 1, squeeze=False, sharex=True)[:, 0]
    for axes, (name, record) in zip(panels, drawn.items(), strict=True):
        _draw_phases(axes, name, record)
    panels[-1].set(xlabel="seconds from the first arrival")
    handles: list[Artist] = [Patch(color=colour, label=name) for name, colour in _PHASES.items()]
    handles.append(Line2D([], [], color=_POOL, linestyle="-", label="host pool in use"))
    handles.append(Line2D([], [], color=_DEVICE, linestyle="--", label="device blocks in use"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    save_figure(figure, path)


def _draw_phases(axes: "Axes", name: str, record: RunRecord) -> None:
    began = record.arrivals[0].arrival_time
    for kind, colour in _PHASES.items():
        spans = [(phase.began - began, phase.seconds) for phase in record.phases if _kind(phase) == kind]
        axes.broken_barh(spans, (_STRIP[0], _STRIP[1] - _STRIP[0]), color=colour, linewidth=0)
        axes.broken_barh(spans, (0, 100), color=colour, alpha=0.12, linewidth=0)
    times = [moment - began for moment, _ in record.blocks]
    device = [100 * blocks.used_device / blocks.device for _, blocks in record.blocks]
    pool = [100 * blocks.used_host / blocks.host for _, blocks in record.blocks]
    axes.step(times, device, "--", where="post", color=_DEVICE, linewidth=1)
    axes.step(times, pool, "-", where="post", color=_POOL, linewidth=1.4)
    transitions = sum(phase.kind == "reshard" for phase in record.phases)
    many = "1 transition" if transitions == 1 else f"{transitions} transitions"
    axes.set_title(f"{name}: {record.makespan:,.1f} s, {many}")
    axes.set(ylabel="% of the blocks", ylim=(0, _TOP), yticks=range(0, 101, 25))
    axes.set_xlim(left=0)
    axes.grid(axis="y", alpha=0.3)


def _kind(phase: Phase) -> str:
    """A key of _PHASES."""
    return {"drain": "draining", "reshard": "re-sharding"}.get(phase.kind) or ("decode" if phase.layout else "prefill")


def plot_throughputs(path: Path, title: str, benches: Sequence[Bench]) -> None:
    """A panel for each KV limit, with throughput over the length of answers; a line for each variant (APEX, figure 7):
    medians of all rounds, with bars from the lowest round to the highest.

    Args:
        benches: one for each case, whose facts are the share of KV memory and the output tokens.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    measured = sorted((one for one in benches if one.done), key=lambda one: (one.facts["share"], one.facts["output"]))
    limits = [list(group) for _, group in groupby(measured, lambda one: one.facts["share"])]
    figure = titled_figure(title, 1.2 + 4.2 * len(limits), 4.8)
    panels = figure.subplots(1, len(limits), squeeze=False, sharey=True)[0]
    for panel, cases in zip(panels, limits, strict=True):
        _draw_throughputs(panel, cases)
    panels[0].set_ylim(bottom=0)  # applies to all panels; only now, because the limits stop growing with the data
    panels[0].set_ylabel("output tokens per second")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    save_figure(figure, path)


def _draw_throughputs(panel: "Axes", cases: Sequence[Bench]) -> None:
    outputs = [case.facts["output"] for case in cases]
    names = [variant.name for variant in cases[0].variants]
    for name, colour, marker in zip(names, cycle(_LINES), cycle(_MARKERS), strict=False):
        values = [sorted(done.variants[name]["output_tokens_per_s"] for done in case.done) for case in cases]
        medians = [median(found) for found in values]
        spread = [
            [middle - found[0] for middle, found in zip(medians, values, strict=True)],
            [found[-1] - middle for middle, found in zip(medians, values, strict=True)],
        ]
        panel.errorbar(outputs, medians, spread, color=colour, marker=marker, capsize=3, linewidth=1.5, label=name)
    share = cases[0].facts["share"]
    panel.set_title("KV memory for everything" if share >= 1 else f"KV memory for {share:.0%} of everything")
    panel.set_xlabel("output tokens of a request")
    panel.set_xticks(outputs)
    panel.margins(x=0.08)
    panel.grid(axis="y", alpha=0.3)
