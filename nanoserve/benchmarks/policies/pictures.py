"""What a comparison shows: stages at work, phases and full KV caches, and throughput. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from itertools import cycle, groupby
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from nanoserve.benchmarks.policies.rounds import Bench, Run
from nanoserve.measures.charts import AnnotatedPanel, AnyPanel, Band, Chart, ChartCurve, draw
from nanoserve.record.phases import Phase
from nanoserve.record.run_record import RunRecord, stage_shares
from nanoserve.record.times import StageTimes
from nanoserve.record.window import StepWindow, token_panels

_MARKERS = "osv^Dx+*"
_TOP = 122.0
"""Where the vertical axis of phases ends: its lines end at 100 %, and above them are the phases."""


def plot_stages(path: Path, title: str, runs: Mapping[str, Run]) -> None:
    """A row for each run: some consecutive micro-batches on their way through the stages, and the tokens of all (gLLM,
    figure 1).

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    counts = [
        [(step, planned.plan.decodes, planned.plan.prompt_tokens) for step, planned in run.record.planned.items()]
        for run in runs.values()
    ]
    titles = [f"{name}: tokens of each micro-batch" for name in runs]
    panels: list[AnyPanel] = []
    first: StepWindow | None = None
    for (name, run), tokens in zip(runs.items(), token_panels(titles, "micro-batch", counts), strict=True):
        window = _window(run, first)
        first = first or window
        shares = stage_shares(run.record, run.variant.layouts[0].tensor_parallel)
        idle = f"; stages idle for {sum(share.bubbles for share in shares) / len(shares):.0%}" if shares else ""
        panels.append(window.gantt(f"{name}: which micro-batch is where{idle}"))
        panels.append(tokens)
    draw(Chart(title, panels, columns=2), path, panel_size=(7.5, 2.7))


def _window(run: Run, beside: StepWindow | None) -> StepWindow:
    """Where each stage's device worked on each plan, in seconds from the first arrival on.

    A single process reports no times of its one stage; its results tell how long each step took.
    """
    record = run.record
    window = StepWindow(record.arrivals[0].arrival_time, beside)
    stages = record.stages(run.variant.layouts[0].tensor_parallel) or [_single_stage(record)]
    for planned, *times in zip(record.planned.values(), *stages, strict=True):
        window.on_step(planned, times)
    return window


def _single_stage(record: RunRecord) -> list[StageTimes]:
    times = []
    for step, planned in record.planned.items():
        ended = record.known[step]
        began = ended - record.result_of[step].seconds
        tokens = planned.plan.decodes + planned.plan.prompt_tokens
        times.append(StageTimes(step, 0, tokens, began, began, began, began, ended, ended))
    return times


def plot_phases(path: Path, title: str, runs: Mapping[str, Run]) -> None:
    """A panel for each run with two layouts: a strip of its phases above the share of blocks in use (Seesaw, figures 2
    and 6).

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    drawn = {name: run for name, run in runs.items() if len(run.variant.layouts) == 2}
    end = max(run.record.makespan for run in drawn.values())
    panels = [_phases_panel(name, run, end) for name, run in drawn.items()]
    draw(Chart(title, panels, columns=1), path, panel_size=(13.0, 2.7))


def _phases_panel(name: str, run: Run, end: float) -> AnnotatedPanel:
    record = run.record
    began = record.arrivals[0].arrival_time
    times = [moment - began for moment, _ in record.blocks]
    device = [100 * blocks.used_device / blocks.device for _, blocks in record.blocks]
    pool = [100 * blocks.used_host / blocks.host for _, blocks in record.blocks]
    transitions = sum(phase.kind == "reshard" for phase in record.phases)
    many = "1 transition" if transitions == 1 else f"{transitions} transitions"
    return AnnotatedPanel(
        title=f"{name}: {record.makespan:,.1f} s, {many}",
        x="time from the first arrival on, s",
        y="% of the blocks",
        curves=[
            ChartCurve("host pool in use", times, pool, style="k-"),
            ChartCurve("device blocks in use", times, device, style="C4--"),
        ],
        kind="step",
        bands=[Band(_kind(phase), phase.began - began, phase.began - began + phase.seconds) for phase in record.phases],
        top=_TOP,
        right=end,
    )


def _kind(phase: Phase) -> str:
    """A label with a colour of its own."""
    return {"drain": "draining", "reshard": "re-sharding"}.get(phase.kind) or ("decode" if phase.layout else "prefill")


def plot_throughputs(path: Path, title: str, benches: Sequence[Bench]) -> None:
    """A panel for each KV limit, with throughput over the length of answers; a line for each variant (APEX, figure 7):
    medians of all rounds, with the range from the lowest round to the highest.

    Args:
        benches: one for each case, whose facts are the share of KV memory and the output tokens.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    measured = sorted((one for one in benches if one.done), key=lambda one: (one.facts["share"], one.facts["output"]))
    limits = groupby(measured, lambda one: one.facts["share"])
    panels = [_throughputs(share, list(cases)) for share, cases in limits]
    top = 1.05 * max(high for panel in panels for curve in panel.curves for high in curve.highs)
    draw(Chart(title, [replace(panel, top=top) for panel in panels]), path, panel_size=(4.4, 4.4))


def _throughputs(share: float, cases: Sequence[Bench]) -> AnnotatedPanel:
    outputs = [case.facts["output"] for case in cases]
    curves = []
    for variant, marker in zip(cases[0].variants, cycle(_MARKERS), strict=False):
        rounds = [[done.variants[variant.name]["output_tokens_per_s"] for done in case.done] for case in cases]
        middle, lows, highs = ([which(values) for values in rounds] for which in (median, min, max))
        curves.append(ChartCurve(variant.name, outputs, middle, lows, highs, style=f"{marker}-"))
    return AnnotatedPanel(
        title="KV memory for everything" if share >= 1 else f"KV memory for {share:.0%} of everything",
        x="output tokens of a request",
        y="output tokens per second",
        curves=curves,
    )
