"""Metrics of a run, as each comparison asks for them: of a pipeline's stages, of layouts, and of memory tiers.

Each function returns `Metrics`: the names are those of the JSON reports. No torch.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import get_args

import numpy as np

from nanoserve.benchmarks.floors import Limits, ModelCost, StepShape
from nanoserve.benchmarks.policies.gains import HYBRID, gains_of_run
from nanoserve.benchmarks.policies.rounds import Metrics, PolicyRound, Run
from nanoserve.benchmarks.policies.simulated import compare_with_simulator, rerun
from nanoserve.costs.work import Strategy
from nanoserve.measures.metrics import MILLISECONDS, Distribution, in_milliseconds, request_distributions
from nanoserve.record.forecasts import Forecast
from nanoserve.record.phases import Phase, PhaseTurn
from nanoserve.record.run_record import RunRecord, engine_seconds, move_metrics, stage_shares, working_seconds
from nanoserve.scheduler.plan import StepPlan, Tier

_STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_TOLERANCE = 0.02
"""A gain may exceed its bound by this share of the device's tokens per second and count as at it: step times scatter,
and the closed form takes the second pass through the linear layers to be as long as the first, which has more rows."""


def _request_metrics(record: RunRecord) -> Metrics:
    """Rates over the time from the first arrival to the last token."""
    seconds, timings = record.makespan, record.timings
    outputs, inputs = sum(one.output_tokens for one in timings), sum(one.input_tokens for one in timings)
    return {
        "seconds": seconds,
        "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (inputs + outputs) / seconds,
        "requests": len(timings),
        "preemptions": record.blocks[-1][1].preemptions,
    }


def _simulated(run: Run) -> Metrics | None:
    """What the simulator makes of a run; None if it has no model of the engine."""
    variant = run.variant
    if not variant.engine.simulated:
        return None
    make, vocab_size = partial(variant.scheduler, simulated=True), variant.engine.vocab_size
    return compare_with_simulator(run.record, make, vocab_size=vocab_size, layouts=variant.layouts)


def stage_metrics(run: Run, first: Run, *, cost: ModelCost, limits: Limits) -> Metrics:
    """Of a pipeline: latencies, micro-batches, and where the time of the stages went.

    The floor of the run is that of the model's ``cost`` and the machine's ``limits``. Raises ValueError if a replay of
    the run makes other plans.
    """
    record = run.record
    shapes, engine = [StepShape.of(plan) for plan in record.plans], engine_seconds(record)
    tokens = [shape.tokens for shape in shapes]
    return {
        **_request_metrics(record),
        **request_distributions(record.timings),
        "steps": len(shapes),  # micro-batches, and how tokens are distributed over them
        "tokens": Distribution.of(tokens),
        "prompt_tokens": Distribution.of(shape.tokens - shape.decoding for shape in shapes),
        "decodes": Distribution.of(shape.decoding for shape in shapes),
        "variation": statistics.pstdev(tokens) / statistics.fmean(tokens),
        "stages": stage_shares(record, run.variant.layouts[0].tensor_parallel),  # empty for a single process
        "engine_ms": statistics.median(engine) * MILLISECONDS,  # to make a plan
        "engine_share": sum(engine) / working_seconds(record),
        "floor_seconds": sum(cost.floor_seconds(shape, limits) for shape in shapes),  # on the whole machine
        "simulated": _simulated(run),
    }


def layout_metrics(run: Run, first: Run) -> Metrics:
    """Changes of layout, where the time went, and what was moved; None for these with a single layout.

    Raises ValueError if a replay of the run makes other plans.
    """
    record, link = run.record, run.variant.engine.host_link_bandwidth
    two = len(run.variant.layouts) == 2
    used = [blocks.used_host / blocks.host for _, blocks in record.blocks if blocks.host]
    return {
        **_request_metrics(record),
        "steps": sum(bool(plan.rows) for plan in record.plans),
        "transitions": sum(plan.transition is not None for plan in record.plans),
        "phases": _phase_metrics(record.phases) if two else None,
        "reshards": move_metrics(record, "reshard", link) if two else None,
        "swaps_out": move_metrics(record, "out", link) if two else None,
        "swaps_in": move_metrics(record, "in", link) if two else None,
        "pool_peak": max(used, default=None),  # largest share of the host pool in use
        "simulated": _simulated(run),
    }


def phase_label(phase: Phase) -> str:
    """What an engine does in a phase, without the layout's name."""
    return {"drain": "draining", "reshard": "re-sharding"}.get(phase.kind) or ("decode" if phase.layout else "prefill")


def _phase_metrics(phases: Sequence[Phase]) -> Metrics:
    """Seconds and token rates of each kind of phase, and what became of sequences at the ends of decode phases."""
    seconds, tokens = defaultdict[str, float](float), Counter[str]()
    for phase in phases:
        seconds[phase_label(phase)] += phase.seconds
        tokens[phase_label(phase)] += phase.prompt_tokens + phase.decodes
    turns = [phase.turn for phase in phases if phase.turn is not None and phase.layout]
    return {
        **{label.replace("-", ""): seconds[label] for label in ("prefill", "decode", "draining", "re-sharding")},
        **{
            f"{label}_tokens_per_s": tokens[label] / seconds[label] if seconds[label] > 0 else None
            for label in ("prefill", "decode")
        },
        **{name: sum(getattr(turn, name) for turn in turns) for name in PhaseTurn._fields},
    }


def tier_metrics(run: Run, first: Run) -> Metrics:
    """Latencies by where the KV was, steps by strategy, errors of predictions, and gains over the first variant."""
    record, variant = run.record, run.variant
    seconds, plans, results = record.makespan, record.plans, list(record.results)
    directions = Counter(swap.direction for plan in plans for swap in plan.swaps)
    assert run.times is not None, "the engine measures times"
    make = partial(variant.scheduler, simulated=True)
    simulated = rerun(record, [run.times], make, vocab_size=variant.engine.vocab_size)
    decided = (planned.time - planned.clock for planned in record.planned.values())
    return {
        **_request_metrics(record),
        "latencies": {
            "ttft_ms": in_milliseconds(timing.ttft for timing in record.timings),
            # A request's whole latency over its output tokens (APEX, figure 6).
            "token_ms": in_milliseconds(timing.e2el / timing.output_tokens for timing in record.timings),
            "device": _tier_latencies(record, "device"),
            "host": _tier_latencies(record, "host"),
        },
        "steps": step_counts(plans),
        # Shares of the time in which a step was under way, and in which the CPU computed attention.
        "device_share": sum(result.seconds for result in results) / seconds,
        "processor_share": sum(work.seconds for result in results for work in result.host_work) / seconds,
        "engine_ms": MILLISECONDS * statistics.median(decided),  # from known results to the next plan
        "swaps_out": directions["out"],
        "swaps_in": directions["in"],
        "errors": {
            name: _errors(one for one in record.of(Forecast) if name in ("all", one.work.strategy))
            for name in ("all", *_STRATEGIES)
        },
        "gains": gains_of_run(record, first.record, variant.engine.predictors[0]),
        "simulated": {"seconds": simulated.makespan, "steps": step_counts(simulated.plans)},
        "simulation_error": seconds / simulated.makespan - 1,  # of output tokens per second
    }


def step_counts(plans: Sequence[StepPlan]) -> dict[Strategy, int]:
    """Steps by strategy; plans that only swap are no steps."""
    counts = Counter(plan.strategy for plan in plans if plan.ends)
    return {strategy: counts[strategy] for strategy in _STRATEGIES}


def _tier_latencies(record: RunRecord, tier: Tier) -> Metrics:
    """Tokens that were computed with their KV in this tier, without the first of each request, and their ITL."""
    gaps = [
        gap
        for timing, tiers in zip(record.timings, record.tiers, strict=True)
        for gap, where in zip(timing.itls, tiers[1:], strict=True)
        if where == tier
    ]
    return {"tokens": len(gaps), "itl_ms": in_milliseconds(gaps)}


def _errors(forecasts: Iterable[Forecast]) -> dict[str, float] | None:
    """Errors of predicted step times as shares of the measured times; None without measured steps.

    "median" and "p90" are of their sizes. "bias" is the median with its sign: above 0, too much is predicted.
    """
    errors = np.array([one.predicted / one.measured - 1 for one in forecasts if one.measured])
    if not errors.size:
        return None
    median, p90 = np.percentile(np.abs(errors), (50, 90))
    return {"steps": errors.size, "median": float(median), "p90": float(p90), "bias": float(np.median(errors))}


def findings(rounds: Sequence[PolicyRound], *, holds_everything: bool) -> dict[str, tuple[str, ...]]:
    """Where a promise of the paper or the policies did not hold in a case; rounds that do not count are included.

    Returns names of variants: with hybrid steps although the device holds everything, if it does in this case, and with
    a gain beyond the closed form's bound.
    """
    runs = [run for done in rounds for run in done.variants.items()]
    hybrid = [name for name, figures in runs if any(figures["steps"][strategy] for strategy in HYBRID)]
    beyond = [
        name
        for name, figures in runs
        for part in (figures["gains"] or {}).values()
        if part is not None and part["gain"] > part["bound"] + _TOLERANCE
    ]
    return {
        "hybrid_although_it_fits": tuple(dict.fromkeys(hybrid if holds_everything else ())),
        "beyond_bound": tuple(dict.fromkeys(beyond)),
    }
