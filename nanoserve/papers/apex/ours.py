"""What is asked of the policies beside the paper's figures: the fixed list for ours, and latency over rates (figure 6).

The fixed list: both platforms, mean outputs from 50 to 1000, three loads: half of what the device alone can serve, a
fifth more than it can, and everything at once.
"""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from msgspec.structs import replace

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.apex.settings import (
    A10,
    APEX,
    DEVICE,
    HYBRID,
    NEO,
    SYSTEMS,
    T4,
    TOKEN_BUDGETS,
    HostCase,
    HostOutcome,
    Platform,
    mean_lengths,
    throughput,
)
from nanoserve.papers.apex.throughput import ALL_OUTPUTS, OUTPUTS, HostBacklog, backlogs
from nanoserve.papers.cases import Runs, over_seeds, tuned, with_budget
from nanoserve.papers.charts import Chart, panel
from nanoserve.papers.claims import Claim, ClaimRow, Spread, claims
from nanoserve.papers.framework import Finding, Run, Scale

BELOW, ABOVE = 0.5, 1.2
"""Rates of the fixed list, over what the device alone can serve."""
_RATES = (0.5, 0.8, 1.0, 1.2)
"""Figure 6's."""
_LONGER = 2
"""Times as many requests at the full size."""

Loads = Runs[tuple[HostBacklog, float | None, str], HostCase]
"""By backlog, load (None for all at once) and label of the system: one case for each seed."""


def fixed_list(scale: Scale, run: Run) -> Finding:
    """HybridByPrediction beside the four that it chooses among; and all of them where memory is no constraint."""
    outputs = scale.pick(OUTPUTS, ALL_OUTPUTS)
    lengths = [(A10, f"1000:{output}") for output in outputs] + [(T4, f"osc:{output}") for output in outputs]
    runs = _loads([_small_backlog(platform, name, scale) for platform, name in lengths], (BELOW, ABOVE), scale, run)
    rows = [
        {
            "platform": setting.platform.name,
            "lengths": setting.lengths,
            "load": "all at once" if load is None else f"{load:.1f} of capacity",
            "system": label,
            "throughput": runs.mean((setting, load, label), throughput),
            "ratio": runs.ratio((setting, load, HYBRID.label), (setting, load, label), throughput).mean,
        }
        for setting, load, label in runs.jobs
    ]
    return Finding(_list_claims(rows, runs), None, rows, _COLUMNS)


_COLUMNS = (
    Column("platform", "platform"),
    Column("lengths", "lengths", justify="left"),
    Column("load", "load", justify="left"),
    Column("system", "system", justify="left"),
    Column("tok/s", "throughput", ",.0f"),
    Column("hybrid over it", "ratio", ".3f"),
)


def _list_claims(rows: Sequence[Mapping[str, Any]], runs: Loads) -> list[Claim]:
    ratios = [(row["ratio"], row) for row in rows if row["system"] != HYBRID.label]
    least, worst = min(ratios, key=lambda pair: pair[0])
    where = f"{worst['platform']}, {worst['lengths']}, {worst['load']}, over {worst['system']}"
    below = [
        runs.ratio((setting, load, label), (setting, load, DEVICE.label), throughput).mean
        for setting, load, label in runs.jobs
        if load == BELOW
    ]
    found: list[ClaimRow] = [
        (
            f"list: hybrid over the four others, worst of {len(ratios)} ({where})",
            "ours",
            least,
            "at least 0.980x",
            "prediction by the same costs that the simulator has: no error of a profile",
        ),
        (
            "list: the same, geometric mean",
            "ours",
            geometric_mean(ratio for ratio, _ in ratios),
            "at least 1.000x",
            "the list: how much of it is above what the device can serve",
        ),
        (
            "3.4, rule 1: below the device's capacity: throughput over the device alone, all systems and settings",
            "equal",
            Spread.of(below),
            "0.980x to 1.020x",
            "half of what the device alone can serve",
        ),
    ]
    return claims(None, found)


def _small_backlog(platform: Platform, lengths: str, scale: Scale) -> HostBacklog:
    """Several times what the device holds, fewer where answers are long."""
    _, output = mean_lengths(lengths)
    few = (240, 120) if platform == A10 else (80, 40)
    number = few[0] if output < 300 else round(few[0] - (few[0] - few[1]) * min(1.0, (output - 300) / 700))
    return HostBacklog(platform, lengths, number * scale.pick(1, _LONGER))


def _loads(settings: Sequence[HostBacklog], rates: Sequence[float], scale: Scale, run: Run) -> Loads:
    """Each backlog, and the same requests with Poisson arrivals at shares of the device's capacity.

    Every system is tuned with the first seed at the highest rate, and keeps that budget at the lower ones: there any
    budget serves all requests, and unlike budgets would show in latency as unlike policies.
    """
    full = backlogs(settings, scale, run)
    wanted: dict[tuple[HostBacklog, float | None, str], HostCase] = {}
    for (setting, label), backlog in full.jobs.items():
        capacity = full.outcomes((setting, DEVICE.label))[0].result.requests_per_second
        for rate in rates:
            wanted[setting, rate, label] = replace(backlog[0], rate=rate * capacity)
    seeds = scale.seeds[: scale.pick(1, len(scale.seeds))]
    pairs = list(full.jobs)
    highest = tuned([wanted[setting, max(rates), label] for setting, label in pairs], run, throughput, TOKEN_BUDGETS)
    budgets = {pair: case.system.token_budget for pair, case in zip(pairs, highest, strict=True)}
    jobs = {key: over_seeds(with_budget(case, budgets[key[0], key[2]]), seeds) for key, case in wanted.items()}
    jobs |= {(setting, None, label): list(backlog) for (setting, label), backlog in full.jobs.items()}
    return Runs(run, jobs)


# --------------------------------------------------------------------------------------------------------- figure 6

_LATENCIES = {T4: ("osc:200", "nearly half", "at most 0.75x"), A10: ("1000:200", "slightly below", "at most 1.00x")}
"""By platform: lengths, the paper's word for APEX over NEO, and what is asked."""


def latency(scale: Scale, run: Run) -> Finding:
    """Figure 6: latency per token, the whole latency of a request over its output tokens, against the rate."""
    places = [_small_backlog(platform, name, scale) for platform, (name, _, _) in _LATENCIES.items()]
    runs = _loads(places, _RATES, scale, run)
    rows = [
        {
            "platform": setting.platform.name,
            "rate": load,
            "system": label,
            "latency": 1e3 * runs.mean((setting, load, label), _latency),
        }
        for setting, load, label in runs.jobs
        if load is not None
    ]
    columns = (
        Column("platform", "platform"),
        Column("rate over capacity", "rate", ".1f"),
        Column("system", "system", justify="left"),
        Column("latency per token, ms", "latency", ",.0f"),
    )
    found: list[ClaimRow] = [
        (
            f"{one.platform.name}: latency per token at {ABOVE:.1f} of the device's capacity, APEX over NEO",
            _LATENCIES[one.platform][1],
            runs.ratio((one, ABOVE, APEX.label), (one, ABOVE, NEO.label), _latency),
            _LATENCIES[one.platform][2],
            "who has more throughput has shorter queues; a host token by overlap takes layers + 1 steps",
        )
        for one in places
    ]
    panels = [
        panel(
            f"{one.platform.name}, {one.lengths}",
            "request rate, 1/s",
            "latency per token, ms",
            [runs.jobs[one, rate, DEVICE.label][0].rate or 0.0 for rate in _RATES],
            {
                system.label: [1e3 * runs.mean((one, rate, system.label), _latency) for rate in _RATES]
                for system in SYSTEMS
            },
        )
        for one in places
    ]
    return Finding(claims("6", found), Chart("APEX, figure 6: latency per token", panels, columns=2), rows, columns)


def _latency(outcome: HostOutcome) -> float:
    return outcome.latency_per_token
