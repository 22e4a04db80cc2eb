"""Metrics and pictures of each comparison: of a pipeline's stages, of layouts, and of memory tiers.
No torch.

Functions of runs return `Metrics` with the names of the JSON reports; those of benches return a
`Picture`.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle, groupby
from typing import get_args

import numpy as np
from msgspec.structs import replace

from nanoserve.costs.profile import MeasuredTimes
from nanoserve.lab.benchmarks.floors import Limits, ModelCost, step_work
from nanoserve.lab.benchmarks.policies.gains import HYBRID, decode_only, decode_steps, gains_of_run
from nanoserve.lab.benchmarks.policies.rounds import Bench, Metrics, PolicyRound, Run
from nanoserve.lab.benchmarks.policies.simulated import compare_with_simulator, rerun
from nanoserve.lab.charts import AnyPanel, Band, ChartCurve, Panel
from nanoserve.lab.step_window import StepWindow, token_panels
from nanoserve.record.events import Forecast
from nanoserve.record.metrics import (
    MILLISECONDS,
    Distribution,
    in_milliseconds,
    request_distributions,
)
from nanoserve.record.phases import Phase, PhaseTurn
from nanoserve.record.run_record import (
    RunRecord,
    engine_seconds,
    move_metrics,
    stage_shares,
    working_seconds,
)
from nanoserve.record.times import StageTimes
from nanoserve.scheduler.optional import Tier
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.work import Strategy

Picture = tuple[Sequence[AnyPanel], int, tuple[float, float]]
"""Panels, how many of them are in a row, and the size of each in inches."""
_MARKERS = "osv^Dx+*"
# where the vertical axis of phases ends: its lines end at 100 %, and above them are the phases
_TOP = 122.0
_STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_TOLERANCE = 0.02
"""A gain may exceed its bound by this share: step times scatter, and the closed form takes the
second pass through the linear layers to be as long as the first, which has more rows."""


def _request_metrics(run: Run) -> Metrics:
    """Rates over the time from the first arrival to the last token, and the rate that costs
    measured before all runs predict; None without these."""
    record, variant, predicted = run.record, run.variant, None
    seconds, timings = record.makespan, record.timings
    outputs, inputs = (
        sum(one.output_tokens for one in timings),
        sum(one.input_tokens for one in timings),
    )
    costs = variant.engine.costs[variant.first : variant.first + len(variant.layouts)]
    if costs:
        make = partial(variant.scheduler, simulated=True)
        predicted = (
            outputs / rerun(record, costs, make, vocab_size=variant.engine.vocab_size).makespan
        )
    return {
        "seconds": seconds,
        "output_tokens_per_s": outputs / seconds,
        "predicted_tokens_per_s": predicted,
        "total_tokens_per_s": (inputs + outputs) / seconds,
        "requests": len(timings),
        "preemptions": record.blocks[-1][1].preemptions,
    }


def _simulated(run: Run) -> Metrics | None:
    """Simulate a run and compare it with the simulation; None if the simulator has no model of the
    engine."""
    variant = run.variant
    if not variant.engine.simulated:
        return None
    make, vocab_size = partial(variant.scheduler, simulated=True), variant.engine.vocab_size
    return compare_with_simulator(run.record, make, vocab_size=vocab_size, layouts=variant.layouts)


def stage_metrics(run: Run, first: Run, *, cost: ModelCost, limits: Limits) -> Metrics:
    """Latencies, micro-batches, and where the time of a pipeline's stages went; the floor is that
    of ``cost`` and ``limits``. Raises ValueError if a replay of the run makes other plans."""
    record = run.record
    steps, engine = [step_work(plan, cost.windows) for plan in record.plans], engine_seconds(record)
    tokens, latencies = [step.tokens for step in steps], request_distributions(record.timings)
    gaps, highest_gap = latencies["itl_ms"], None
    if gaps is not None:
        highest_gap = gaps.p99
    return {
        **_request_metrics(run),
        **latencies,
        "itl_p99_ms": highest_gap,
        "steps": len(steps),  # micro-batches, and how tokens are distributed over them
        "tokens": Distribution.of(tokens),
        "prompt_tokens": Distribution.of(step.tokens - step.decodes for step in steps),
        "decodes": Distribution.of(step.decodes for step in steps),
        "variation": statistics.pstdev(tokens) / statistics.fmean(tokens),
        # empty for a single process
        "stages": stage_shares(record, run.variant.layouts[0].tensor_parallel),
        "engine_ms": statistics.median(engine) * MILLISECONDS,  # to make a plan
        "engine_share": sum(engine) / working_seconds(record),
        # on the whole machine
        "floor_seconds": sum(cost.floor_seconds(step, limits) for step in steps),
        "simulated": _simulated(run),
    }


def layout_metrics(run: Run, first: Run) -> Metrics:
    """Changes of layout, where the time went, and what was moved; None for these with a single
    layout. Raises ValueError if a replay of the run makes other plans."""
    record, link = run.record, run.variant.engine.host_link_bandwidth
    used = [blocks.used_host / blocks.host for _, blocks in record.blocks if blocks.host]
    metrics = {
        **_request_metrics(run),
        "steps": sum(bool(plan.rows) for plan in record.plans),
        "transitions": sum(plan.layouts.transition is not None for plan in record.plans),
        "phases": None,
        "reshards": None,
        "swaps_out": None,
        "swaps_in": None,
        "pool_peak": max(used, default=None),  # largest share of the host pool in use
        "simulated": _simulated(run),
    }
    if len(run.variant.layouts) == 2:
        metrics["phases"] = _phase_metrics(record.phases)
        metrics["reshards"] = move_metrics(record, "reshard", link)
        metrics["swaps_out"] = move_metrics(record, "out", link)
        metrics["swaps_in"] = move_metrics(record, "in", link)
    return metrics


def phase_label(phase: Phase) -> str:
    """Name an engine's work in a phase, without the layout's name."""
    if phase.kind == "drain":
        return "draining"
    if phase.kind == "reshard":
        return "re-sharding"
    if phase.layout:
        return "decode"
    return "prefill"


def _phase_metrics(phases: Sequence[Phase]) -> Metrics:
    """Seconds and token rates of each kind of phase, and what became of sequences at the ends of
    decode phases."""
    seconds, tokens = defaultdict[str, float](float), Counter[str]()
    for phase in phases:
        seconds[phase_label(phase)] += phase.seconds
        tokens[phase_label(phase)] += phase.prompt_tokens + phase.decodes
    turns = [phase.turn for phase in phases if phase.turn is not None and phase.layout]
    labels = ("prefill", "decode", "draining", "re-sharding")
    metrics: Metrics = {label.replace("-", ""): seconds[label] for label in labels}
    for label in ("prefill", "decode"):
        metrics[f"{label}_tokens_per_s"] = None
        if seconds[label] > 0:
            metrics[f"{label}_tokens_per_s"] = tokens[label] / seconds[label]
    return metrics | {
        name: sum(getattr(turn, name) for turn in turns) for name in PhaseTurn._fields
    }


def tier_metrics(run: Run, first: Run) -> Metrics:
    """Latencies by where the KV was, steps by strategy, errors of predictions, and gains over the
    first variant."""
    record, variant = run.record, run.variant
    seconds, plans, results = record.makespan, record.plans, list(record.results)
    directions = Counter(swap.direction for plan in plans for swap in plan.host.swaps)
    assert run.times is not None, "the engine measures times"
    make = partial(variant.scheduler, simulated=True)
    decided = [planned.time - planned.clock for planned in record.planned.values()]
    times = run.times
    if isinstance(times, MeasuredTimes):
        # The policy, what it learns, and the record make more of it than the profile's engine,
        # which only schedules.
        times = times.with_engine(statistics.fmean(decided))
    simulated = rerun(record, [times], make, vocab_size=variant.engine.vocab_size)
    return {
        **_request_metrics(run),
        "latencies": {
            "ttft_ms": in_milliseconds(timing.ttft for timing in record.timings),
            # A request's whole latency over its output tokens (APEX, figure 6).
            "token_ms": in_milliseconds(
                timing.e2el / timing.output_tokens for timing in record.timings
            ),
            "device": _tier_latencies(record, "device"),
            "host": _tier_latencies(record, "host"),
        },
        "steps": step_counts(plans),
        # Shares of the time in which a step was under way, and in which the CPU computed attention.
        "device_share": sum(result.seconds for result in results) / seconds,
        "processor_share": sum(work.seconds for result in results for work in result.host.work)
        / seconds,
        # from known results to the next plan
        "engine_ms": MILLISECONDS * statistics.median(decided),
        "swaps_out": directions["out"],
        "swaps_in": directions["in"],
        "errors": _errors_by_strategy(list(record.of(Forecast))),
        "decode_only": decode_only(
            list(decode_steps(record, variant.engine.predictors[0].num_layers))
        ),
        "gains": gains_of_run(record, first.record, variant.engine.predictors[0]),
        "simulated": {"seconds": simulated.makespan, "steps": step_counts(simulated.plans)},
        "simulation_error": seconds / simulated.makespan - 1,  # of output tokens per second
    }


def step_counts(plans: Sequence[StepPlan]) -> dict[Strategy, int]:
    """Steps by strategy; plans that only swap are no steps."""
    counts = Counter(plan.host.strategy for plan in plans if plan.ends)
    return {strategy: counts[strategy] for strategy in _STRATEGIES}


def _tier_latencies(record: RunRecord, tier: Tier) -> Metrics:
    """Tokens that were computed with their KV in this tier, without the first of each request, and
    their ITL."""
    gaps = [
        gap
        for timing, tiers in zip(record.timings, record.tiers, strict=True)
        for gap, where in zip(timing.itls, tiers[1:], strict=True)
        if where == tier
    ]
    return {"tokens": len(gaps), "itl_ms": in_milliseconds(gaps)}


def _errors_by_strategy(forecasts: Sequence[Forecast]) -> dict[str, dict[str, float] | None]:
    found = {"all": _errors(forecasts)}
    for strategy in _STRATEGIES:
        found[strategy] = _errors(one for one in forecasts if one.work.strategy == strategy)
    return found


def _errors(forecasts: Iterable[Forecast]) -> dict[str, float] | None:
    """Errors of predicted step times as shares of the measured times; None without measured steps.
    "median" and "p90" are of their sizes, "bias" is the median with its sign: above 0, too much is
    predicted."""
    errors = np.array([one.predicted / one.measured - 1 for one in forecasts if one.measured])
    if not errors.size:
        return None
    median, p90 = np.percentile(np.abs(errors), (50, 90))
    return {
        "steps": errors.size,
        "median": float(median),
        "p90": float(p90),
        "bias": float(np.median(errors)),
    }


def findings(
    rounds: Sequence[PolicyRound], *, holds_everything: bool
) -> dict[str, tuple[str, ...]]:
    """Variants for which a promise did not hold in any round of a case: those with hybrid steps
    although the device holds everything, if it does, and those with a gain beyond the closed form's
    bound."""
    runs = [run for done in rounds for run in done.variants.items()]
    hybrid: list[str] = []
    if holds_everything:
        hybrid = [
            name for name, figures in runs if any(figures["steps"][strategy] for strategy in HYBRID)
        ]
    beyond = [
        name
        for name, figures in runs
        for part in (figures["gains"] or {}).values()
        if part is not None and part["gain"] > part["bound"] + _TOLERANCE
    ]
    return {
        "hybrid_although_it_fits": tuple(dict.fromkeys(hybrid)),
        "beyond_bound": tuple(dict.fromkeys(beyond)),
    }


def stages_picture(benches: Sequence[Bench]) -> Picture:
    """A row for each variant's last run: some consecutive micro-batches on their way through the
    stages, and the tokens of all (gLLM, figure 1)."""
    runs = benches[0].last
    counts = [
        [
            (step, planned.plan.decodes, planned.plan.prompt_tokens)
            for step, planned in run.record.planned.items()
        ]
        for run in runs.values()
    ]
    titles = [f"{name}: tokens of each micro-batch" for name in runs]
    panels: list[AnyPanel] = []
    first: StepWindow | None = None
    for (name, run), tokens in zip(
        runs.items(), token_panels(titles, "micro-batch", counts), strict=True
    ):
        record, degree = run.record, run.variant.layouts[0].tensor_parallel
        window = StepWindow(record.arrivals[0].arrival_time, first)
        first = first or window
        stages = record.stages(degree) or [_single_stage(record)]
        for planned, times in zip(record.planned.values(), zip(*stages, strict=True), strict=True):
            window.on_step(planned, times)
        title, shares = f"{name}: which micro-batch is where", stage_shares(record, degree)
        if shares:
            title += f"; stages idle for {sum(share.bubbles for share in shares) / len(shares):.0%}"
        panels += [window.gantt(title), tokens]
    return panels, 2, (7.5, 2.7)


def _single_stage(record: RunRecord) -> list[StageTimes]:
    """A single process reports no times of its one stage; its results tell how long each step
    took."""
    times = []
    for step, planned in record.planned.items():
        ended = record.known[step]
        began = ended - record.result_of[step].seconds
        tokens = planned.plan.decodes + planned.plan.prompt_tokens
        times.append(StageTimes(step, 0, tokens, began, began, began, began, ended, ended))
    return times


def phases_picture(benches: Sequence[Bench]) -> Picture:
    """A panel for each last run with two layouts: a strip of its phases above the share of blocks
    in use (Seesaw, figures 2 and 6)."""
    drawn = {
        name: run.record for name, run in benches[0].last.items() if len(run.variant.layouts) == 2
    }
    end = max(record.makespan for record in drawn.values())
    return [_phases_panel(name, record, end) for name, record in drawn.items()], 1, (13.0, 2.7)


def _phases_panel(name: str, record: RunRecord, end: float) -> Panel:
    start = record.arrivals[0].arrival_time
    times = [moment - start for moment, _ in record.blocks]
    device = [100 * blocks.used_device / blocks.device for _, blocks in record.blocks]
    pool = [100 * blocks.used_host / blocks.host for _, blocks in record.blocks]
    begins = [(phase, phase.began - start) for phase in record.phases]
    transitions = sum(phase.kind == "reshard" for phase in record.phases)
    many = f"{transitions} transitions"
    if transitions == 1:
        many = "1 transition"
    return Panel(
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
    """A panel for each KV limit, with throughput over the length of answers; a line for each
    variant (APEX, figure 7): medians of all rounds, with the range from the lowest round to the
    highest. The facts of the benches are the share of KV memory and the output tokens."""
    measured = sorted(
        (one for one in benches if one.done),
        key=lambda one: (one.facts["share"], one.facts["output"]),
    )
    limits = groupby(measured, lambda one: one.facts["share"])
    panels = [_throughputs(share, list(cases)) for share, cases in limits]
    top = 1.05 * max(high for panel in panels for curve in panel.curves for high in curve.highs)
    return [replace(panel, top=top) for panel in panels], 4, (4.4, 4.4)


def _throughputs(share: float, cases: Sequence[Bench]) -> Panel:
    outputs = [case.facts["output"] for case in cases]
    curves = []
    for variant, marker in zip(cases[0].variants, cycle(_MARKERS), strict=False):
        rounds = [
            [done.variants[variant.name]["output_tokens_per_s"] for done in case.done]
            for case in cases
        ]
        middle, lows, highs = (
            [which(values) for values in rounds] for which in (statistics.median, min, max)
        )
        curves.append(ChartCurve(variant.name, outputs, middle, lows, highs, style=f"{marker}-"))
    title = "KV memory for everything"
    if share < 1:
        title = f"KV memory for {share:.0%} of everything"
    return Panel(
        title=title,
        x="output tokens of a request",
        y="output tokens per second",
        curves=curves,
    )
