"""gLLM, sections 4.2 and 4.4: latency, throughput and SLO attainment against request rates (figures
10, 13, 14)."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import linear_regression

import msgspec
from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, Panel, panel
from nanoserve.lab.papers.cases import (
    TOKEN_BUDGETS,
    Case,
    Metric,
    Outcome,
    Runs,
    System,
    over_seeds,
    tuned,
)
from nanoserve.lab.papers.claims import Ours, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.gllm.systems import (
    A100,
    A800,
    AZURE,
    GLLM,
    L20,
    LLAMA_100B,
    METRICS,
    QWEN_14B,
    QWEN_32B,
    SGLANG,
    SHAREGPT,
    UNITS,
    VLLM,
    WITH_CK,
    deep_backlog,
    e2el,
    metric_columns,
    on_devices,
    throughput,
    ttft,
)
from nanoserve.lab.simulator.workload import length_tables
from nanoserve.record.metrics import Slo, Spread

SYSTEMS = (VLLM, SGLANG, GLLM)
_FEWEST = 200
"""Requests of a run, at least."""
_TURNING_SECONDS = 1.0  # a mean TTFT that says that requests with ShareGPT's prompts queue
# the paper does not state its SLOs: they are taken as this many times what a mean request takes
# alone
_PATIENCE = 5
_RATE = "request rate, req/s"


class RateSweep(msgspec.Struct, frozen=True, kw_only=True):
    """A column of figure 10 or 13: a model on a machine, and the rates at which requests arrive."""

    model: str
    machine: str
    lengths: str
    rates: tuple[float, ...]
    with_limits: bool = False
    """Whether SLO attainment is asked for too (figure 14)."""

    @property
    def title(self) -> str:
        trace = "Azure"
        if self.lengths == SHAREGPT:
            trace = "ShareGPT"
        return f"{self.model}, {trace}"

    def cases(self, system: System, scale: Scale) -> dict[float, list[Case]]:
        """Cases by rate, one for each seed: requests arrive for equally long at all rates."""
        seconds = scale.pick(60, 90)
        base = on_devices(
            system,
            model=self.model,
            machine=self.machine,
            lengths=self.lengths,
            requests=_FEWEST,
            steady=(0.3, 0.9),
        )
        if self.with_limits:
            base = replace(base, slo=lone_request_limits(base))
        return {
            rate: over_seeds(
                replace(base, rate=rate, requests=max(_FEWEST, round(rate * seconds))), scale.seeds
            )
            for rate in self.rates
        }


def lone_request_limits(case: Case) -> Slo:
    """Limits: ``_PATIENCE`` times the TTFT and the TPOT of a request of mean length, alone."""
    costs, table = case.costs(), length_tables()[case.lengths]
    prompt, context = round(table.mean_input), round(table.mean_input + table.mean_output / 2)
    first = costs.step_seconds(costs.work([], [(0, prompt)]))
    following = costs.step_seconds(costs.work([context]))
    return Slo(ttft=_PATIENCE * first * 1e3, tpot=_PATIENCE * following * 1e3)


INTRA_NODE = (
    RateSweep(model=QWEN_32B, machine=L20, lengths=SHAREGPT, rates=(1, 4, 8, 12, 16)),
    RateSweep(model=QWEN_32B, machine=L20, lengths=AZURE, rates=(0.5, 1, 2, 3, 4, 5)),
    RateSweep(model=QWEN_14B, machine=L20, lengths=SHAREGPT, rates=(2, 5, 10, 20, 30, 40)),
    RateSweep(model=QWEN_14B, machine=L20, lengths=AZURE, rates=(1, 2, 4, 6, 8, 10)),
)
LLAMA_AZURE = RateSweep(
    model=LLAMA_100B, machine=A800, lengths=AZURE, rates=(0.5, 1, 2, 3, 4), with_limits=True
)
CROSS_NODE = (
    LLAMA_AZURE,
    RateSweep(model=LLAMA_100B, machine=A800, lengths=SHAREGPT, rates=(1, 2, 4, 8, 12, 16)),
    RateSweep(model=QWEN_32B, machine=A100, lengths=SHAREGPT, rates=(2, 5, 10, 20, 30, 40)),
    RateSweep(model=QWEN_32B, machine=A100, lengths=AZURE, rates=(1, 2, 4, 7, 10, 13)),
    RateSweep(model=QWEN_14B, machine=A100, lengths=SHAREGPT, rates=(5, 10, 20, 40, 60, 80)),
    RateSweep(model=QWEN_14B, machine=A100, lengths=AZURE, rates=(2, 5, 10, 15, 20, 25)),
)

Sweeps = Runs[tuple[str, str, float]]
"""Runs by title of the sweep, label of the system and rate; the deep backlogs have the title
``_DEEP`` and no rate."""
_DEEP = "deep backlog"


def _jobs(
    sweeps: Sequence[RateSweep], systems: Sequence[System], scale: Scale
) -> dict[tuple[str, str, float], list[Case]]:
    return {
        (sweep.title, system.label, rate): cases
        for sweep in sweeps
        for system in systems
        for rate, cases in sweep.cases(system, scale).items()
    }


RATE_COLUMNS = [
    *columns(("", "setting"), ("<", "system"), ("g", ("req/s", "rate"))),
    *metric_columns(str.lower),
]


def _finding(
    title: str, ours: Ours, sweeps: Sequence[RateSweep], runs: Sweeps, **words: object
) -> Finding:
    """The four metrics against the rate, by setting and system."""
    table = [
        {
            "setting": sweep.title,
            "system": system.label,
            "rate": rate,
            **{
                name.lower(): value
                for name, value in runs.means((sweep.title, system.label, rate), METRICS).items()
            },
        }
        for sweep in sweeps
        for system in SYSTEMS
        for rate in sweep.rates
    ]
    panels = [
        _over_rates(sweep, SYSTEMS, runs, f"{name}, {UNITS[name]}", metric)
        for sweep in sweeps
        for name, metric in METRICS.items()
    ]
    return Finding(claims("gllm", ours, **words), Chart(title, panels, columns=4), table)


def _over_rates(
    sweep: RateSweep,
    systems: Sequence[System],
    runs: Sweeps,
    y: str,
    metric: Metric,
    marks: tuple[float, ...] = (),
) -> Panel:
    heights = {
        one.label: [runs.spread((sweep.title, one.label, rate), metric) for rate in sweep.rates]
        for one in systems
    }
    return panel(sweep.title, _RATE, y, sweep.rates, heights, marks=marks)


def intra_node(scale: Scale, run: Run) -> Finding:
    """Figure 10: 4 x L20 in one node."""
    sweeps = scale.pick(INTRA_NODE[:1], INTRA_NODE)
    backlogs = {
        (_DEEP, system.label, 0.0): deep_backlog(scale, system) for system in (GLLM, WITH_CK, VLLM)
    }
    # no other figure has it
    backlogs[_DEEP, SGLANG.label, 0.0] = deep_backlog(scale, SGLANG, ends_steady=True)
    runs = Runs(run, _jobs(sweeps, SYSTEMS, scale) | backlogs)
    first = sweeps[0]
    ours = _turning_points(first, runs)
    above, below = ((first.title, one.label, min(first.rates)) for one in (SGLANG, GLLM))
    ours["10 lowest rate"] = runs.ratio(above, below, e2el)
    for other in (WITH_CK, VLLM, SGLANG):
        ours[f"10 most {other.label}"] = runs.ratio(
            (_DEEP, GLLM.label, 0.0), (_DEEP, other.label, 0.0), throughput
        )
    budgets = scale.pick((512, 2048), TOKEN_BUDGETS)
    best = _tuned_backlogs(budgets, scale, run)
    for other in (WITH_CK, VLLM):
        ours[f"10 tuned {other.label}"] = best.ratio(GLLM.label, other.label, throughput)
    return _finding(
        "gLLM, figure 10: one node with 4 x L20",
        ours,
        sweeps,
        runs,
        budgets=", ".join(map(str, budgets)),
        with_ck=best.cases[WITH_CK.label][0].system.token_budget,
        vllm=best.cases[VLLM.label][0].system.token_budget,
    )


def cross_node(scale: Scale, run: Run) -> Finding:
    """Figure 13: four nodes with one device each, 73.28 Gbps between them."""
    sweeps = scale.pick(CROSS_NODE[:1], CROSS_NODE)
    runs = Runs(run, _jobs(sweeps, SYSTEMS, scale))
    highest = {one: (LLAMA_AZURE.title, one.label, LLAMA_AZURE.rates[-1]) for one in SYSTEMS}
    ours: Ours = {
        f"13 {one.label}": runs.ratio(highest[GLLM], highest[one], throughput)
        for one in (VLLM, SGLANG)
    }
    return _finding("gLLM, figure 13: four nodes", ours, sweeps, runs)


def _turning_points(sweep: RateSweep, runs: Sweeps) -> Ours:
    turning = {
        one: _by_seed(sweep, one, runs, ttft, lambda points: _passes(points, _TURNING_SECONDS, 0.0))
        for one in SYSTEMS
    }
    slopes = {one: _by_seed(sweep, one, runs, e2el, _slope) for one in SYSTEMS}
    ours: Ours = {}
    for other in (VLLM, SGLANG):
        ours[f"10 turning {other.label}"] = _over(turning[GLLM], turning[other])
        ours[f"10 slope {other.label}"] = _over(slopes[GLLM], slopes[other])
    return ours


def _tuned_backlogs(budgets: Sequence[int], scale: Scale, run: Run) -> Runs[str]:
    """Runs by label of the system, with the budget of highest throughput, which the paper does not
    look for."""
    systems = (GLLM, WITH_CK, VLLM)
    best = tuned(
        [case for one in systems for case in deep_backlog(scale.first_seed, one)],
        run,
        throughput,
        budgets,
    )
    return Runs(
        run,
        {one.label: [case for case in best if case.system.label == one.label] for one in systems},
    )


Points = Sequence[tuple[float, float]]  # a metric against the rate


def _by_seed(
    sweep: RateSweep,
    system: System,
    runs: Sweeps,
    metric: Metric,
    number: Callable[[Points], float],
) -> list[float]:
    """A number of each seed's points."""
    by_rate = [runs.values((sweep.title, system.label, rate), metric) for rate in sweep.rates]
    return [
        number(list(zip(sweep.rates, values, strict=True))) for values in zip(*by_rate, strict=True)
    ]


def _over(above: Sequence[float], below: Sequence[float]) -> Spread:
    return Spread.of(mine / theirs for mine, theirs in zip(above, below, strict=True))


def _passes(points: Points, limit: float, start: float) -> float:
    """The rate at which a metric passes a limit, on a straight line between two rates; the last if
    it never does.

    ``start`` is the metric at rate 0. It lies above the limit if the metric falls.
    """
    falls, before = start > limit, (0.0, start)
    for rate, value in points:
        if (falls and value < limit) or (not falls and value > limit):
            return before[0] + (rate - before[0]) * (limit - before[1]) / (value - before[1])
        before = (rate, value)
    return before[0]


def _slope(points: Points) -> float:
    """Slope of a straight line through the points, by least squares."""
    return linear_regression([rate for rate, _ in points], [value for _, value in points]).slope


_GOAL = 80.0  # per cent of the requests


ATTAINMENT_COLUMNS = columns(
    ("", "system"), ("g", ("req/s", "rate")), (".0f", ("attainment %", "attainment"))
)


def slo_attainment(scale: Scale, run: Run) -> Finding:
    """Figure 14: the share of requests within limits of TTFT and TPOT, 100B on four nodes."""
    sweep, systems = LLAMA_AZURE, (VLLM, GLLM)
    runs = Runs(run, _jobs([sweep], systems, scale))
    lowest: Mapping[str, tuple[str, str, float]] = {
        one.label: (sweep.title, one.label, min(sweep.rates)) for one in systems
    }
    limits = lone_request_limits(runs.cases[lowest[GLLM.label]][0])

    def over_vllm(number: Callable[[Points], float]) -> Spread:
        ours = _by_seed(sweep, GLLM, runs, attainment, number)
        return _over(ours, _by_seed(sweep, VLLM, runs, attainment, number))

    least = [runs.mean(lowest[system.label], attainment) for system in (GLLM, VLLM)]
    ours: Ours = {
        "14 area": over_vllm(_area),
        "14 goal": over_vllm(lambda points: _passes(points, _GOAL, 100.0)),
        "14 lowest rate": least[0] - least[1],
    }
    limits_in_words = {
        "ttft": f"{(limits.ttft or 0) / 1e3:.1f} s",
        "tpot": f"{limits.tpot or 0:.0f} ms",
    }
    curves = _over_rates(sweep, systems, runs, "SLO attainment, %", attainment, marks=(_GOAL,))
    rows = [
        {"system": label, "rate": rate, "attainment": runs.mean((title, label, rate), attainment)}
        for title, label, rate in runs.cases
    ]
    chart = Chart("gLLM, figure 14: four nodes with A800", [curves])
    return Finding(claims("gllm", ours, **limits_in_words), chart, rows)


def attainment(outcome: Outcome) -> float:
    """Per cent of the requests within the limits."""
    assert outcome.result.slo_attainment is not None, "limits were given"
    return 100 * outcome.result.slo_attainment


def _area(points: Points) -> float:
    """The area under a metric over the rate."""
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairwise(points))
