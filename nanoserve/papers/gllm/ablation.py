"""gLLM, sections 4.5 and 4.6: what each part of Token Throttling does (figure 15), and its parameters (figure 16)."""

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import Case, Outcome, System
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Outcomes, Run, Scale
from nanoserve.papers.gllm.systems import (
    GLLM,
    VLLM,
    WITH_CK,
    WITH_CK_AND_RESERVE,
    WITHOUT_UT,
    WITHOUT_WT,
    at_rate,
    deep_backlog,
    e2el,
    throughput,
    tpot,
    ttft,
)
from nanoserve.papers.tuning import ratio, spread, with_budget
from nanoserve.scheduler.registry import POLICIES

_BELOW = 2.5
"""Requests per second, about a sixth of what the machine can do: where the throttling of waiting tokens acts."""
_METRICS: dict[str, Callable[[Outcome], float]] = {"TTFT": ttft, "TPOT": tpot, "E2EL": e2el, "throughput": throughput}
_LOW, _DEEP = f"{_BELOW:g} requests a second", "deep backlog"
_HIGHER = (5.0, 10.0)
"""Where prompts meet one another: without WT they stall the stages, and TTFT grows too."""


def ablation(scale: Scale, run: Run) -> Finding:
    """Figure 15: each part acts in a load of its own, so there are two."""
    seconds = scale.pick(150.0, 600.0)
    low = {
        one.label: at_rate(one, _BELOW, seconds, scale.seeds) for one in (GLLM, WITHOUT_WT, WITHOUT_UT, WITH_CK, VLLM)
    }
    deep = {one.label: deep_backlog(scale, one) for one in (GLLM, WITHOUT_UT, WITH_CK, WITH_CK_AND_RESERVE, VLLM)}
    higher = {
        f"{rate:g} requests a second": {
            one.label: at_rate(one, rate, scale.pick(60.0, 300.0), scale.seeds) for one in (GLLM, WITHOUT_WT)
        }
        for rate in _HIGHER
    }
    if scale.full:
        deep[WITHOUT_WT.label] = deep_backlog(scale, WITHOUT_WT)
    outcomes = run(case for loads in (low, *higher.values(), deep) for cases in loads.values() for case in cases)
    claims = [
        *_removed(_LOW, WITHOUT_WT, low, outcomes, "paper's load is not stated; at twice this rate TTFT grows too"),
        *(
            _removed(load, WITHOUT_WT, loads, outcomes, "whole prompts stall one another in the pipeline")[0]
            for load, loads in higher.items()
        ),
        *_unchanged(WITHOUT_UT, low, outcomes),
        *_removed(_DEEP, WITHOUT_UT, deep, outcomes, "memory full of running answers: the free share is what is left"),
        _over_vllm("throughput", "1.10x", deep, outcomes, at_least=1.05),
        _over_vllm("E2EL", "0.92x", deep, outcomes, at_most=0.95),
        Claim(
            figure="15",
            says=f"{_DEEP}: throughput of gLLM w/ CK with nanoserve's admission reserve, over w/ CK",
            paper="ours",
            ours=ratio(deep[WITH_CK_AND_RESERVE.label], deep[WITH_CK.label], outcomes, throughput),
            form="{:.2f}x",
            at_least=1.0,
            assumption="who is begun without room to grow is preempted, and computed again",
        ),
    ]
    rows = [
        {"load": load, "system": label, **{name: spread(cases, outcomes, one).mean for name, one in _METRICS.items()}}
        for load, systems in ((_LOW, low), *higher.items(), (_DEEP, deep))
        for label, cases in systems.items()
    ]
    return Finding(claims, _ablation_chart(low, deep, outcomes), rows, [Column("load", "load"), *_COLUMNS])


_COLUMNS = [
    Column("system", "system", justify="left"),
    Column("TTFT s", "TTFT", ",.2f"),
    Column("TPOT ms", "TPOT", ",.0f"),
    Column("E2EL s", "E2EL", ",.1f"),
    Column("tok/s", "throughput", ",.0f"),
]

_PAPERS: dict[str, dict[str, tuple[str, float | None, float | None]]] = {
    WITHOUT_WT.label: {
        "TTFT": ("0.90x", None, 1.0),
        "TPOT": ("1.44x", 1.1, None),
        "E2EL": ("1.20x", 1.1, None),
        "throughput": ("-", 0.95, 1.05),
    },
    WITHOUT_UT.label: {
        "TTFT": ("1.22x", 1.1, None),
        "TPOT": ("1.91x", 1.1, None),
        "E2EL": ("1.38x", 1.1, None),
        "throughput": ("-", None, 0.95),
    },
}
"""What removing a part does to each metric: the paper's number, and the bounds of the relation."""


def _removed(
    load: str, system: System, cases: Mapping[str, Sequence[Case]], outcomes: Outcomes, why: str
) -> list[Claim]:
    return [
        Claim(
            figure="15",
            says=f"{load}: {metric} of {system.label}, over gLLM's",
            paper=paper,
            ours=ratio(cases[system.label], cases[GLLM.label], outcomes, _METRICS[metric]),
            form="{:.2f}x",
            at_least=low,
            at_most=high,
            assumption=why,
        )
        for metric, (paper, low, high) in _PAPERS[system.label].items()
    ]


def _unchanged(system: System, cases: Mapping[str, Sequence[Case]], outcomes: Outcomes) -> list[Claim]:
    return [
        Claim(
            figure="15",
            says=f"{_LOW}: {metric} of {system.label}, over gLLM's",
            paper="-",
            ours=ratio(cases[system.label], cases[GLLM.label], outcomes, _METRICS[metric]),
            form="{:.3f}x",
            at_least=0.99,
            at_most=1.01,
            assumption="memory is nearly empty, and waiting tokens are fewer than free ones",
        )
        for metric in ("TPOT", "throughput")
    ]


def _over_vllm(
    metric: str, paper: str, cases: Mapping[str, Sequence[Case]], outcomes: Outcomes, **bounds: float
) -> Claim:
    return Claim(
        figure="15",
        says=f"{_DEEP}: {metric} of gLLM w/ CK, over vLLM's",
        paper=paper,
        ours=ratio(cases[WITH_CK.label], cases[VLLM.label], outcomes, _METRICS[metric]),
        form="{:.2f}x",
        assumption="the paper's own 17 % for preparing inputs in a coupled runtime, none hidden",
        **bounds,
    )


def _ablation_chart(low: Mapping[str, Sequence[Case]], deep: Mapping[str, Sequence[Case]], outcomes: Outcomes) -> Chart:
    units = {"TTFT": "s", "TPOT": "ms", "E2EL": "s", "throughput": "tokens/s"}
    panels = []
    for load, systems in ((_LOW, low), (_DEEP, deep)):
        for metric, figure in _METRICS.items():
            heights = tuple(spread(cases, outcomes, figure).mean for cases in systems.values())
            names = tuple(label.removeprefix("gLLM ") for label in systems)
            panels.append(
                Panel(
                    title=load,
                    x="",
                    y=f"{metric}, {units[metric]}",
                    curves=(Curve(label="", xs=names, ys=heights),),
                    kind="bar",
                    marks=(heights[0],),
                )
            )
    return Chart(title="gLLM, figure 15: ablation (dotted: gLLM)", panels=tuple(panels), columns=4)


# --------------------------------------------------------------------------------------------------------- figure 16

_BUSY = 10.0
"""Requests per second: two thirds of what the machine can do."""
_MODERATE = f"{_BUSY:g} requests a second"
_ITERATIONS, _MIN_PREFILLS = (1, 2, 4, 8, 16), (8, 32, 128)
_MAX_PREFILLS, _THRESHOLDS = (512, 2048, 4096), (0.0, 0.05, 0.2)
_DEFAULTS = {"T": 8, "MinP": 32, "MaxP": 2048, "threshold": 0.05}

Sweeps = Mapping[tuple[str, str], Mapping[float, Sequence[Case]]]
"""By parameter and load, then by the parameter's value."""


def sensitivity(scale: Scale, run: Run) -> Finding:
    """Figure 16: T where prompts wait, MaxP and the threshold in a backlog, for they need full memory to act."""
    low = at_rate(GLLM, _BELOW, scale.pick(150.0, 600.0), scale.seeds)
    busy = at_rate(GLLM, _BUSY, scale.pick(60.0, 300.0), scale.seeds)
    deep = deep_backlog(scale.first_seed, GLLM)
    sweeps: Sweeps = {
        ("T", _LOW): {value: _set(low, iterations=value) for value in _ITERATIONS},
        ("T", _MODERATE): {value: _set(busy, iterations=value) for value in _ITERATIONS},
        ("MinP", _MODERATE): {value: _set(busy, min_prefill=value) for value in _MIN_PREFILLS},
        ("MinP", _DEEP): {value: _set(deep, min_prefill=value) for value in _MIN_PREFILLS},
        ("MaxP", _DEEP): {value: [with_budget(case, value) for case in deep] for value in _MAX_PREFILLS},
        ("threshold", _DEEP): {value: _set(deep, threshold=value) for value in _THRESHOLDS},
    }
    outcomes = run(case for sweep in sweeps.values() for cases in sweep.values() for case in cases)
    rows = [
        {
            "load": load,
            "system": f"{name} = {value:g}",
            **{metric: spread(cases, outcomes, one).mean for metric, one in _METRICS.items()},
        }
        for (name, load), sweep in sweeps.items()
        for value, cases in sweep.items()
    ]
    claims = [*_parameter_claims(sweeps, outcomes), *_min_prefill_claims(sweeps, outcomes)]
    return Finding(claims, _sensitivity_chart(sweeps, outcomes), rows, [Column("load", "load"), *_COLUMNS])


def _set(cases: Sequence[Case], **parameters: float) -> list[Case]:
    """With these parameters; at their defaults these are the cases that other figures run too."""
    changed = {name: value for name, value in parameters.items() if value != POLICIES["throttling"].defaults[name]}
    return [replace(case, system=case.system.with_(case.system.label, **changed)) for case in cases]


def _parameter_claims(sweeps: Sweeps, outcomes: Outcomes) -> list[Claim]:
    wanted: list[tuple[str, str, float, float, str, str, float | None, float | None, str]] = [
        ("T", _LOW, 4, 1, "TTFT", "stable", 0.8, 1.2, "paper's load is not stated; stable between this and the next"),
        ("T", _MODERATE, 4, 1, "TTFT", "stable", 0.8, 1.2, "with T = 1 whole prompts stall the stages"),
        ("T", _LOW, 16, 4, "TTFT", "longer", 1.01, None, "prompts alone, in ever smaller pieces"),
        ("T", _MODERATE, 8, 1, "TPOT", "falls", None, 0.99, "uneven prompts"),
        ("T", _MODERATE, 8, 1, "E2EL", "falls", None, 0.99, "uneven prompts"),
        (
            "MaxP",
            _DEEP,
            512,
            2048,
            "throughput",
            "lower",
            None,
            0.98,
            "needs a device that is idle at 400 tokens a step",
        ),
        ("MaxP", _DEEP, 4096, 2048, "TPOT", "longer", 1.01, None, "memory full of running answers"),
        (
            "threshold",
            _DEEP,
            0.0,
            0.05,
            "throughput",
            "slightly lower",
            None,
            0.99,
            "needs memory to run out, which UT prevents here",
        ),
    ]
    return [
        Claim(
            figure="16",
            says=f"{load}: {metric} with {name} = {value:g}, over {name} = {base:g}",
            paper=paper,
            ours=ratio(sweeps[name, load][value], sweeps[name, load][base], outcomes, _METRICS[metric]),
            form="{:.2f}x",
            at_least=low,
            at_most=high,
            assumption=why,
        )
        for name, load, value, base, metric, paper, low, high, why in wanted
    ]


def _min_prefill_claims(sweeps: Sweeps, outcomes: Outcomes) -> list[Claim]:
    claims = []
    for load, why in (
        (_MODERATE, "where few prompt tokens wait, MinP is what a step takes: needs a queue"),
        (_DEEP, "prompts queue"),
    ):
        sweep = sweeps["MinP", load]
        moved = [
            100 * abs(ratio(cases, sweep[_DEFAULTS["MinP"]], outcomes, one).mean - 1)
            for cases in sweep.values()
            for one in _METRICS.values()
        ]
        claims.append(
            Claim(
                figure="16",
                says=f"{load}: the most that MinP from 8 to 128 moves any metric",
                paper="below 2 %",
                ours=Spread.of([max(moved)]),
                form="{:.1f} %",
                at_most=2,
                assumption=why,
            )
        )
    return claims


def _sensitivity_chart(sweeps: Sweeps, outcomes: Outcomes) -> Chart:
    """Each metric over its value at the default, as in the paper."""
    panels = []
    for (name, load), sweep in sweeps.items():
        curves = tuple(
            Curve(
                label=metric,
                xs=tuple(sweep),
                ys=tuple(ratio(cases, sweep[_DEFAULTS[name]], outcomes, one).mean for cases in sweep.values()),
            )
            for metric, one in _METRICS.items()
        )
        panels.append(Panel(title=load, x=name, y="over its value at the default", curves=curves, marks=(1.0,)))
    return Chart(title="gLLM, figure 16: sensitivity", panels=tuple(panels), columns=3)
