"""What a comparison shows: stages at work, phases and full KV caches, and throughput.

Each function returns panels, how many of them are in a row, and the size of each in inches.
"""

from collections.abc import Sequence
from itertools import cycle, groupby
from statistics import median

from msgspec.structs import replace

from nanoserve.benchmarks.policies.metrics import phase_label
from nanoserve.benchmarks.policies.rounds import Bench
from nanoserve.measures.charts import AnnotatedPanel, AnyPanel, Band, ChartCurve
from nanoserve.record.run_record import RunRecord
from nanoserve.record.shares import stage_shares
from nanoserve.record.times import StageTimes
from nanoserve.record.window import StepWindow, token_panels

Picture = tuple[Sequence[AnyPanel], int, tuple[float, float]]
_MARKERS = "osv^Dx+*"
_TOP = 122.0  # where the vertical axis of phases ends: its lines end at 100 %, and above them are the phases


def stages_picture(benches: Sequence[Bench]) -> Picture:
    """A row for each variant's last run: some consecutive micro-batches on their way through the stages, and the tokens
    of all (gLLM, figure 1)."""
    runs = benches[0].last
    counts = [
        [(step, planned.decodes, planned.prompt_tokens) for step, planned in run.record.planned.items()]
        for run in runs.values()
    ]
    titles = [f"{name}: tokens of each micro-batch" for name in runs]
    panels: list[AnyPanel] = []
    first: StepWindow | None = None
    for (name, run), tokens in zip(runs.items(), token_panels(titles, "micro-batch", counts), strict=True):
        record, degree = run.record, run.variant.layouts[0].tensor_parallel
        window = StepWindow(record.arrivals[0].arrival_time, first)
        first = first or window
        stages = record.stages(degree) or [_single_stage(record)]
        for planned, *times in zip(record.planned.values(), *stages, strict=True):
            window.on_step(planned, times)
        shares = stage_shares(record, degree)
        idle = f"; stages idle for {sum(share.bubbles for share in shares) / len(shares):.0%}" if shares else ""
        panels += [window.gantt(f"{name}: which micro-batch is where{idle}"), tokens]
    return panels, 2, (7.5, 2.7)


def _single_stage(record: RunRecord) -> list[StageTimes]:
    """A single process reports no times of its one stage; its results tell how long each step took."""
    times = []
    for step, planned in record.planned.items():
        ended = record.known[step]
        began = ended - record.result_of[step].seconds
        tokens = planned.decodes + planned.prompt_tokens
        times.append(StageTimes(step, 0, tokens, began, began, began, began, ended, ended))
    return times


def phases_picture(benches: Sequence[Bench]) -> Picture:
    """A panel for each last run with two layouts: a strip of its phases above the share of blocks in use (Seesaw,
    figures 2 and 6)."""
    drawn = {name: run.record for name, run in benches[0].last.items() if len(run.variant.layouts) == 2}
    end = max(record.makespan for record in drawn.values())
    return [_phases_panel(name, record, end) for name, record in drawn.items()], 1, (13.0, 2.7)


def _phases_panel(name: str, record: RunRecord, end: float) -> AnnotatedPanel:
    start = record.arrivals[0].arrival_time
    times = [moment - start for moment, _ in record.blocks]
    device = [100 * blocks.used_device / blocks.device for _, blocks in record.blocks]
    pool = [100 * blocks.used_host / blocks.host for _, blocks in record.blocks]
    begins = [(phase, phase.began - start) for phase in record.phases]
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
        bands=[Band(phase_label(phase), began, began + phase.seconds) for phase, began in begins],
        top=_TOP,
        right=end,
    )


def throughputs_picture(benches: Sequence[Bench]) -> Picture:
    """A panel for each KV limit, with throughput over the length of answers; a line for each variant (APEX, figure 7):
    medians of all rounds, with the range from the lowest round to the highest. The facts of the benches are the share
    of KV memory and the output tokens."""
    measured = sorted((one for one in benches if one.done), key=lambda one: (one.facts["share"], one.facts["output"]))
    limits = groupby(measured, lambda one: one.facts["share"])
    panels = [_throughputs(share, list(cases)) for share, cases in limits]
    top = 1.05 * max(high for panel in panels for curve in panel.curves for high in curve.highs)
    return [replace(panel, top=top) for panel in panels], 4, (4.4, 4.4)


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
