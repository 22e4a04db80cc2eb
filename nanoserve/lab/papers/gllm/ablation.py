"""gLLM, sections 4.5 and 4.6: what each part of Token Throttling does (figure 15), and its
parameters (figure 16)."""

from collections.abc import Sequence

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.cases import Case, Runs, with_budget
from nanoserve.lab.papers.claims import Ours, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.gllm.systems import (
    GLLM,
    METRICS,
    UNITS,
    VLLM,
    WITH_CK,
    WITH_CK_AND_RESERVE,
    WITHOUT_UT,
    WITHOUT_WT,
    at_rate,
    deep_backlog,
    metric_columns,
)
from nanoserve.scheduler.policies import POLICIES

_BELOW = 2.5
"""Requests per second, about a sixth of what the machine can do: where the throttling of waiting
tokens acts."""
_LOW, _DEEP = f"{_BELOW:g} requests a second", "deep backlog"
_HIGHER = {f"{rate:g} requests a second": rate for rate in (5.0, 10.0)}
"""Where prompts meet one another: without WT they stall the stages, and TTFT grows too."""
PARAMETER_COLUMNS = [*columns(("", "load"), ("<", "system")), *metric_columns(str)]


def ablation(scale: Scale, run: Run) -> Finding:
    """Figure 15: each part acts in a load of its own, so there are two."""
    low = [GLLM, WITHOUT_WT, WITHOUT_UT, WITH_CK, VLLM]
    deep = [GLLM, WITHOUT_UT, WITH_CK, WITH_CK_AND_RESERVE, VLLM]
    if scale.full:
        deep.append(WITHOUT_WT)
    seconds, shorter = scale.pick((150.0, 60.0), (600.0, 300.0))
    jobs = {(_LOW, one.label): at_rate(one, _BELOW, seconds, scale.seeds) for one in low}
    for load, rate in _HIGHER.items():
        jobs |= {
            (load, one.label): at_rate(one, rate, shorter, scale.seeds)
            for one in (GLLM, WITHOUT_WT)
        }
    jobs |= {(_DEEP, one.label): deep_backlog(scale, one) for one in deep}
    runs = Runs(run, jobs)
    compared = [(_LOW, WITHOUT_WT, GLLM, metric) for metric in METRICS]
    compared += [(load, WITHOUT_WT, GLLM, "TTFT") for load in _HIGHER]
    compared += [(_LOW, WITHOUT_UT, GLLM, metric) for metric in ("TPOT", "throughput")]
    compared += [(_DEEP, WITHOUT_UT, GLLM, metric) for metric in METRICS]
    compared += [(_DEEP, WITH_CK, VLLM, metric) for metric in ("throughput", "E2EL")]
    compared.append((_DEEP, WITH_CK_AND_RESERVE, WITH_CK, "throughput"))
    ours = {
        f"15 {load}: {metric} of {above.label}": runs.ratio(
            (load, above.label), (load, below.label), METRICS[metric]
        )
        for load, above, below, metric in compared
    }
    table = [
        {"load": load, "system": label, **runs.means((load, label), METRICS)}
        for load, label in jobs
    ]
    panels = []
    for load, systems in ((_LOW, low), (_DEEP, deep)):
        names = [one.label.removeprefix("gLLM ") for one in systems]
        for metric, unit in UNITS.items():
            heights = [runs.mean((load, system.label), METRICS[metric]) for system in systems]
            panels.append(
                panel(
                    load,
                    "",
                    f"{metric}, {unit}",
                    names,
                    {"": heights},
                    kind="bar",
                    marks=(heights[0],),
                )
            )
    chart = Chart("gLLM, figure 15: ablation (dotted: gLLM)", panels, columns=4)
    return Finding(claims("gllm", ours), chart, table)


_BUSY = 10.0  # requests per second: two thirds of what the machine can do
_MODERATE = f"{_BUSY:g} requests a second"
_DEFAULTS = {"T": 8, "MinP": 32, "MaxP": 2048, "threshold": 0.05}
_PARAMETERS = {"T": "iterations", "MinP": "min_prefill", "threshold": "threshold"}
"""Names of the policy's parameters; MaxP is its token budget."""
_SWEEPS: dict[tuple[str, str], tuple[float, ...]] = {
    ("T", _LOW): (1, 2, 4, 8, 16),
    ("T", _MODERATE): (1, 2, 4, 8, 16),
    ("MinP", _MODERATE): (8, 32, 128),
    ("MinP", _DEEP): (8, 32, 128),
    ("MaxP", _DEEP): (512, 2048, 4096),
    ("threshold", _DEEP): (0.0, 0.05, 0.2),
}
"""Values by parameter and load."""
_METRIC_STYLES = {"TTFT": "o-", "TPOT": "s-", "E2EL": "^-", "throughput": "x--"}
_CLAIMED: list[tuple[str, str, float, float, str]] = [
    ("T", _LOW, 4, 1, "TTFT"),
    ("T", _MODERATE, 4, 1, "TTFT"),
    ("T", _LOW, 16, 4, "TTFT"),
    ("T", _MODERATE, 8, 1, "TPOT"),
    ("T", _MODERATE, 8, 1, "E2EL"),
    ("MaxP", _DEEP, 512, 2048, "throughput"),
    ("MaxP", _DEEP, 4096, 2048, "TPOT"),
    ("threshold", _DEEP, 0.0, 0.05, "throughput"),
]
"""Parameter, load, its value and the one compared with, and the metric."""


def sensitivity(scale: Scale, run: Run) -> Finding:
    """Figure 16: T where prompts wait, MaxP and the threshold in a backlog, for they need full
    memory to act."""
    bases = {
        _LOW: at_rate(GLLM, _BELOW, scale.pick(150.0, 600.0), scale.seeds),
        _MODERATE: at_rate(GLLM, _BUSY, scale.pick(60.0, 300.0), scale.seeds),
        _DEEP: deep_backlog(scale.first_seed, GLLM),
    }
    jobs = {
        (name, load, value): _set(bases[load], name, value)
        for (name, load), values in _SWEEPS.items()
        for value in values
    }
    runs = Runs(run, jobs)
    ours: Ours = {
        f"16 {load}: {metric} with {name} = {value:g}": runs.ratio(
            (name, load, value), (name, load, base), METRICS[metric]
        )
        for name, load, value, base, metric in _CLAIMED
    }

    def over_default(name: str, load: str, metric: str) -> list[float]:
        """Each metric over its value at the parameter's default, as in the paper."""
        default = (name, load, _DEFAULTS[name])
        return [
            runs.ratio((name, load, value), default, METRICS[metric]).mean
            for value in _SWEEPS[name, load]
        ]

    def most_moved(name: str, load: str) -> float:
        """By how many per cent a parameter moves any metric, at most."""
        return 100 * max(
            abs(ratio - 1) for metric in METRICS for ratio in over_default(name, load, metric)
        )

    for load in (_MODERATE, _DEEP):
        ours[f"16 {load}: MinP"] = most_moved("MinP", load)
    table = [
        {"load": load, "system": f"{name} = {value:g}", **runs.means((name, load, value), METRICS)}
        for name, load, value in jobs
    ]
    panels = []
    for (name, load), values in _SWEEPS.items():
        heights = {metric: over_default(name, load, metric) for metric in METRICS}
        title = f"{name}, {load}:\nmetrics move by up to {most_moved(name, load):.1f} %"
        y, is_log = f"over its value at {name} = {_DEFAULTS[name]:g}", name != "threshold"
        panels.append(
            panel(
                title, name, y, values, heights, styles=_METRIC_STYLES, log_x=is_log, marks=(1.0,)
            )
        )
    return Finding(
        claims("gllm", ours), Chart("gLLM, figure 16: sensitivity", panels, columns=3), table
    )


def _set(cases: Sequence[Case], name: str, value: float) -> list[Case]:
    """The cases with that parameter; at its default they are the cases that other figures run
    too."""
    if name == "MaxP":
        return [with_budget(case, int(value)) for case in cases]
    if (name, value) == ("T", 1):  # all waiting tokens at once is what WT prevents
        return [replace(case, system=WITHOUT_WT) for case in cases]
    parameter = _PARAMETERS[name]
    changed: dict[str, float] = {}
    if value != POLICIES["throttling"].defaults[parameter]:
        changed[parameter] = value
    return [replace(case, system=case.system.with_(case.system.label, **changed)) for case in cases]
