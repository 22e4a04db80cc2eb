"""gLLM, sections 4.5 and 4.6: what each part of Token Throttling does (figure 15), and its parameters (figure 16)."""

from collections.abc import Sequence

from msgspec.structs import replace

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import PipelineCase, Runs, System, with_budget
from nanoserve.papers.charts import Chart, panel
from nanoserve.papers.claims import ClaimRow, claims
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.gllm.systems import (
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
"""Requests per second, about a sixth of what the machine can do: where the throttling of waiting tokens acts."""
_LOW, _DEEP = f"{_BELOW:g} requests a second", "deep backlog"
_HIGHER = {f"{rate:g} requests a second": rate for rate in (5.0, 10.0)}
"""Where prompts meet one another: without WT they stall the stages, and TTFT grows too."""
_COLUMNS = [
    Column("load", "load"),
    Column("system", "system", justify="left"),
    *metric_columns(str),
]

_REMOVED = {
    WITHOUT_WT: {
        "TTFT": ("0.90x", "at most 1.00x"),
        "TPOT": ("1.44x", "at least 1.10x"),
        "E2EL": ("1.20x", "at least 1.10x"),
        "throughput": ("-", "0.95x to 1.05x"),
    },
    WITHOUT_UT: {
        "TTFT": ("1.22x", "at least 1.10x"),
        "TPOT": ("1.91x", "at least 1.10x"),
        "E2EL": ("1.38x", "at least 1.10x"),
        "throughput": ("-", "at most 0.95x"),
    },
}
"""What removing a part does to each metric: the paper's number, and the bounds of the relation."""
_UNCHANGED = dict.fromkeys(("TPOT", "throughput"), ("-", "0.990x to 1.010x"))

Loads = Runs[tuple[str, str], PipelineCase]
"""By load and label of the system."""


def ablation(scale: Scale, run: Run) -> Finding:
    """Figure 15: each part acts in a load of its own, so there are two."""
    low = [GLLM, WITHOUT_WT, WITHOUT_UT, WITH_CK, VLLM]
    deep = [GLLM, WITHOUT_UT, WITH_CK, WITH_CK_AND_RESERVE, VLLM, *scale.pick([], [WITHOUT_WT])]
    seconds, shorter = scale.pick((150.0, 60.0), (600.0, 300.0))
    jobs = {(_LOW, one.label): at_rate(one, _BELOW, seconds, scale.seeds) for one in low}
    for load, rate in _HIGHER.items():
        jobs |= {(load, one.label): at_rate(one, rate, shorter, scale.seeds) for one in (GLLM, WITHOUT_WT)}
    jobs |= {(_DEEP, one.label): deep_backlog(scale, one) for one in deep}
    runs = Runs(run, jobs)
    ck, coupled = WITH_CK.label, "the paper's own 17 % for preparing inputs in a coupled runtime, none hidden"
    rows: list[ClaimRow] = [
        *_removed(runs, _LOW, WITHOUT_WT, "paper's load is not stated; at twice this rate TTFT grows too"),
        *(_removed(runs, load, WITHOUT_WT, "whole prompts stall one another in the pipeline")[0] for load in _HIGHER),
        *_over_gllm(
            runs, _LOW, WITHOUT_UT, _UNCHANGED, "memory is nearly empty, and waiting tokens are fewer than free ones"
        ),
        *_removed(runs, _DEEP, WITHOUT_UT, "memory full of running answers: the free share is what is left"),
        *(
            (
                f"{_DEEP}: {metric} of gLLM w/ CK, over vLLM's",
                paper,
                runs.ratio((_DEEP, ck), (_DEEP, VLLM.label), METRICS[metric]),
                asked,
                coupled,
            )
            for metric, paper, asked in (("throughput", "1.10x", "at least 1.05x"), ("E2EL", "0.92x", "at most 0.95x"))
        ),
        (
            f"{_DEEP}: throughput of gLLM w/ CK with nanoserve's admission reserve, over w/ CK",
            "ours",
            runs.ratio((_DEEP, WITH_CK_AND_RESERVE.label), (_DEEP, ck), METRICS["throughput"]),
            "at least 1.00x",
            "who is begun without room to grow is preempted, and computed again",
        ),
    ]
    table = [{"load": load, "system": label, **runs.means((load, label), METRICS)} for load, label in jobs]
    panels = []
    for load, systems in ((_LOW, low), (_DEEP, deep)):
        names = [one.label.removeprefix("gLLM ") for one in systems]
        for metric, one in METRICS.items():
            heights = [runs.mean((load, system.label), one) for system in systems]
            axis = f"{metric}, {UNITS[metric]}"
            panels.append(panel(load, "", axis, names, {"": heights}, kind="bar", marks=(heights[0],)))
    chart = Chart("gLLM, figure 15: ablation (dotted: gLLM)", panels, columns=4)
    return Finding(claims("15", rows), chart, table, _COLUMNS)


def _removed(runs: Loads, load: str, system: System, why: str) -> list[ClaimRow]:
    return _over_gllm(runs, load, system, _REMOVED[system], why)


def _over_gllm(runs: Loads, load: str, system: System, stated: dict[str, tuple[str, str]], why: str) -> list[ClaimRow]:
    return [
        (
            f"{load}: {metric} of {system.label}, over gLLM's",
            paper,
            runs.ratio((load, system.label), (load, GLLM.label), METRICS[metric]),
            asked,
            why,
        )
        for metric, (paper, asked) in stated.items()
    ]


# --------------------------------------------------------------------------------------------------------- figure 16

_BUSY = 10.0
"""Requests per second: two thirds of what the machine can do."""
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
_STABLE = "paper's load is not stated; stable between this and the next"
_CLAIMED: list[tuple[str, str, float, float, str, str, str, str]] = [
    ("T", _LOW, 4, 1, "TTFT", "stable", "0.80x to 1.20x", _STABLE),
    ("T", _MODERATE, 4, 1, "TTFT", "stable", "0.80x to 1.20x", "with T = 1 whole prompts stall the stages"),
    ("T", _LOW, 16, 4, "TTFT", "longer", "at least 1.01x", "prompts alone, in ever smaller pieces"),
    ("T", _MODERATE, 8, 1, "TPOT", "falls", "at most 0.99x", "uneven prompts"),
    ("T", _MODERATE, 8, 1, "E2EL", "falls", "at most 0.99x", "uneven prompts"),
    (
        "MaxP",
        _DEEP,
        512,
        2048,
        "throughput",
        "lower",
        "at most 0.98x",
        "needs a device that is idle at 400 tokens a step",
    ),
    ("MaxP", _DEEP, 4096, 2048, "TPOT", "longer", "at least 1.01x", "memory full of running answers"),
    (
        "threshold",
        _DEEP,
        0.0,
        0.05,
        "throughput",
        "slightly lower",
        "at most 0.99x",
        "needs memory to run out, which UT prevents here",
    ),
]
"""Parameter, load, its value and the one compared with, metric, the paper's word, what is asked, and why."""


def sensitivity(scale: Scale, run: Run) -> Finding:
    """Figure 16: T where prompts wait, MaxP and the threshold in a backlog, for they need full memory to act."""
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
    rows: list[ClaimRow] = [
        (
            f"{load}: {metric} with {name} = {value:g}, over {name} = {base:g}",
            paper,
            runs.ratio((name, load, value), (name, load, base), METRICS[metric]),
            asked,
            why,
        )
        for name, load, value, base, metric, paper, asked, why in _CLAIMED
    ]

    def over_default(name: str, load: str, metric: str) -> list[float]:
        """Each metric over its value at the parameter's default, as in the paper."""
        default = (name, load, _DEFAULTS[name])
        return [runs.ratio((name, load, value), default, METRICS[metric]).mean for value in _SWEEPS[name, load]]

    rows += [
        (
            f"{load}: the most that MinP from 8 to 128 moves any metric",
            "below 2 %",
            max(100 * abs(ratio - 1) for metric in METRICS for ratio in over_default("MinP", load, metric)),
            "at most 2.0 %",
            why,
        )
        for load, why in (
            (_MODERATE, "where few prompt tokens wait, MinP is what a step takes: needs a queue"),
            (_DEEP, "prompts queue"),
        )
    ]
    table = [
        {"load": load, "system": f"{name} = {value:g}", **runs.means((name, load, value), METRICS)}
        for name, load, value in jobs
    ]
    panels = [
        panel(
            load,
            name,
            "over its value at the default",
            values,
            {metric: over_default(name, load, metric) for metric in METRICS},
            marks=(1.0,),
        )
        for (name, load), values in _SWEEPS.items()
    ]
    return Finding(claims("16", rows), Chart("gLLM, figure 16: sensitivity", panels, columns=3), table, _COLUMNS)


def _set(cases: Sequence[PipelineCase], name: str, value: float) -> list[PipelineCase]:
    """The cases with that parameter; at its default they are the cases that other figures run too."""
    if name == "MaxP":
        return [with_budget(case, int(value)) for case in cases]
    parameter = _PARAMETERS[name]
    changed = {} if value == POLICIES["throttling"].defaults[parameter] else {parameter: value}
    return [replace(case, system=case.system.with_(case.system.label, **changed)) for case in cases]
