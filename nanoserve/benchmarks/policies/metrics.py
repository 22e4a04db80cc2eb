"""Metrics of a run, as each comparison asks for them: of a pipeline's stages, of layouts, and of memory tiers.

Each function returns `Metrics`: the names are those of the JSON reports. No torch.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self, get_args

import msgspec
import numpy as np

from nanoserve.benchmarks.floors import Limits, ModelCost, StepShape
from nanoserve.benchmarks.policies.gains import HYBRID, gains_of_run
from nanoserve.benchmarks.policies.rounds import Metrics, PolicyRound, Run
from nanoserve.benchmarks.policies.simulated import SimulatedRatios, compare_with_simulator, rerun
from nanoserve.costs.work import Strategy
from nanoserve.measures.metrics import MILLISECONDS, Distribution, request_distributions
from nanoserve.record.forecasts import Forecast
from nanoserve.record.phases import Phase
from nanoserve.record.run_record import RunRecord, engine_seconds, move_metrics, stage_shares, working_seconds
from nanoserve.scheduler.plan import StepPlan, Tier

_PREFILL, _DECODE = 0, 1
"""Numbers of the two layouts."""
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
        "preemptions": record.preemptions,
    }


def _compared(run: Run, vocab_size: int) -> SimulatedRatios | None:
    """What the simulator makes of a run; None if it has no model of the engine."""
    if not run.variant.engine.simulated:
        return None
    make, layouts = run.variant.make_simulated, run.variant.layouts
    return compare_with_simulator(run.record, make, vocab_size=vocab_size, layouts=layouts)


# ---- stages of a pipeline -------------------------------------------------------------------------------------


def stage_metrics(run: Run, first: Run, *, vocab_size: int, cost: ModelCost, limits: Limits) -> Metrics:
    """Latencies, micro-batches, and where the time of the stages went.

    Args:
        cost, limits: of the model and of this machine, for the floor of the run.

    Raises:
        ValueError: if a replay of the run makes other plans.
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
        "simulated": _compared(run, vocab_size),
    }


# ---- parallel layouts -----------------------------------------------------------------------------------------


def layout_metrics(run: Run, first: Run, *, vocab_size: int) -> Metrics:
    """Changes of layout, where the time went, and what was moved; None for these with a single layout.

    Raises:
        ValueError: if a replay of the run makes other plans.
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
        "simulated": _compared(run, vocab_size),
    }


def _phase_metrics(phases: Sequence[Phase]) -> Metrics:
    """Seconds and token rates of each kind of phase, and what became of sequences at the ends of decode phases."""
    computing = [[one for one in phases if one.kind == "compute" and one.layout == which] for which in (0, 1)]
    turns = [phase.turn for phase in phases if phase.turn is not None and phase.layout == _DECODE]
    return {
        "prefill": _seconds(computing[_PREFILL]),
        "decode": _seconds(computing[_DECODE]),
        "draining": _seconds(phase for phase in phases if phase.kind == "drain"),
        "resharding": _seconds(phase for phase in phases if phase.kind == "reshard"),
        "prefill_tokens_per_s": _rate(computing[_PREFILL]),
        "decode_tokens_per_s": _rate(computing[_DECODE]),
        "through_pool": sum(turn.through_pool for turn in turns),
        "finished": sum(turn.finished for turn in turns),
        "recomputed": sum(turn.recomputed for turn in turns),
    }


def _seconds(phases: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def _rate(phases: Sequence[Phase]) -> float | None:
    seconds = _seconds(phases)
    return sum(phase.prompt_tokens + phase.decodes for phase in phases) / seconds if seconds > 0 else None


# ---- device and host memory -----------------------------------------------------------------------------------


def tier_metrics(run: Run, first: Run, *, vocab_size: int) -> Metrics:
    """Latencies by where the KV was, steps by strategy, errors of predictions, and gains over the first variant."""
    record = run.record
    seconds, plans, results = record.makespan, record.plans, list(record.results)
    directions = Counter(swap.direction for plan in plans for swap in plan.swaps)
    assert run.times is not None, "the engine measures times"
    simulated = rerun(record, [run.times], run.variant.make_simulated, vocab_size=vocab_size)
    decided = (planned.time - planned.clock for planned in record.planned.values())
    return {
        **_request_metrics(record),
        "latencies": _latencies(record),
        "steps": step_counts(plans),
        # Shares of the time in which a step was under way, and in which the CPU computed attention.
        "device_share": sum(result.seconds for result in results) / seconds,
        "processor_share": sum(work.seconds for result in results for work in result.host_work) / seconds,
        "engine_ms": MILLISECONDS * statistics.median(decided),  # from known results to the next plan
        "swaps_out": directions["out"],
        "swaps_in": directions["in"],
        "errors": prediction_errors(record.forecasts),
        "gains": gains_of_run(record, first.record, run.variant.engine.predictors[0]),
        "simulated": {"seconds": simulated.makespan, "steps": step_counts(simulated.plans)},
        "simulation_error": seconds / simulated.makespan - 1,  # of output tokens per second
    }


def step_counts(plans: Sequence[StepPlan]) -> dict[Strategy, int]:
    """Steps by strategy; plans that only swap are no steps."""
    counts = Counter(plan.strategy for plan in plans if plan.ends)
    return {strategy: counts[strategy] for strategy in _STRATEGIES}


def _latencies(record: RunRecord) -> Metrics:
    """TTFT; a request's whole latency over its output tokens (APEX, figure 6); and ITL by tier."""
    timings = record.timings
    return {
        "ttft_ms": Distribution.of(timing.ttft * MILLISECONDS for timing in timings),
        "token_ms": Distribution.of(timing.e2el / timing.output_tokens * MILLISECONDS for timing in timings),
        "device": _tier_latencies(record, "device"),
        "host": _tier_latencies(record, "host"),
    }


def _tier_latencies(record: RunRecord, tier: Tier) -> Metrics:
    """Tokens that were computed with their KV in this tier, without the first of each request, and their ITL."""
    gaps = [
        gap * MILLISECONDS
        for timing, tiers in zip(record.timings, record.tiers, strict=True)
        for gap, where in zip(timing.itls, tiers[1:], strict=True)
        if where == tier
    ]
    return {"tokens": len(gaps), "itl_ms": Distribution.of(gaps)}


class ErrorFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predicted step times, as shares of the measured times."""

    steps: int
    """Number of steps."""
    median: float
    p90: float
    """Percentiles of the absolute errors."""
    bias: float
    """The median with its sign; above 0, too much is predicted."""

    @classmethod
    def of(cls, forecasts: Iterable[Forecast]) -> Self | None:
        """Summarize the errors of these forecasts; None without measured steps."""
        errors = np.array([one.predicted / one.measured - 1 for one in forecasts if one.measured])
        if not errors.size:
            return None
        median, p90 = np.percentile(np.abs(errors), (50, 90))
        return cls(steps=int(errors.size), median=float(median), p90=float(p90), bias=float(np.median(errors)))


def prediction_errors(forecasts: Sequence[Forecast]) -> dict[str, ErrorFigures | None]:
    """Errors of all steps and of those of each strategy; None where none were measured."""
    return {
        name: ErrorFigures.of(one for one in forecasts if name in ("all", one.work.strategy))
        for name in ("all", *_STRATEGIES)
    }


def findings(rounds: Sequence[PolicyRound], *, holds_everything: bool) -> dict[str, Any]:
    """Where a promise of the paper or the policies did not hold in a case; rounds that do not count are included.

    Args:
        holds_everything: whether the device does in this case; no step is to be hybrid then.

    Returns:
        names of variants: with hybrid steps although everything fits, and with a gain beyond the closed form's bound.
    """
    hybrid: dict[str, None] = {}
    beyond: dict[str, None] = {}
    for done in rounds:
        for name, figures in done.variants.items():
            parts = [part for part in (figures["gains"] or {}).values() if part is not None]
            if holds_everything and any(figures["steps"][strategy] for strategy in HYBRID):
                hybrid[name] = None
            if any(part.gain > part.bound + _TOLERANCE for part in parts):
                beyond[name] = None
    return {"hybrid_although_it_fits": tuple(hybrid), "beyond_bound": tuple(beyond)}
