"""What is asked of the policies beside the paper's figures: the fixed list for ours, and latency over rates (figure 6).

The fixed list: both platforms, mean outputs from 50 to 1000, three loads: half of what the device alone can serve, a
fifth more than it can, and everything at once.
"""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean

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
    HostCase,
    HostOutcome,
    Platform,
    mean_lengths,
    ratio,
    throughput,
    tuned,
)
from nanoserve.papers.apex.throughput import ALL_OUTPUTS, OUTPUTS, Backlogs, Setting, backlogs
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Outcomes, Run, Scale
from nanoserve.papers.tuning import over_seeds, spread, with_budget

BELOW, ABOVE = 0.5, 1.2
"""Rates of the fixed list, over what the device alone can serve."""
_RATES = (0.5, 0.8, 1.0, 1.2)
"""Figure 6's."""
_EQUAL = 0.02
_LONGER = 2
"""Times as many requests at the full size."""

Loads = Mapping[tuple[Setting, float | None, str], Sequence[HostCase]]
"""By setting, load (None for all at once) and label of the system: one case for each seed."""


def fixed_list(scale: Scale, run: Run) -> Finding:
    """HybridByPrediction beside the four that it chooses among; and all of them where memory is no constraint."""
    outputs = scale.pick(OUTPUTS, ALL_OUTPUTS)
    lengths = [(A10, f"1000:{output}") for output in outputs] + [(T4, f"osc:{output}") for output in outputs]
    settings = [_small_backlog(platform, name, scale) for platform, name in lengths]
    cases = _loads(settings, (BELOW, ABOVE), scale, run)
    outcomes = run(case for several in cases.values() for case in several)
    rows = []
    for (setting, load, label), several in cases.items():
        mine = cases[setting, load, HYBRID.label]
        rows.append(
            {
                "platform": setting.platform.name,
                "lengths": setting.lengths,
                "load": "all at once" if load is None else f"{load:.1f} of capacity",
                "system": label,
                "throughput": spread(several, outcomes, throughput).mean,
                "ratio": ratio(mine, several, outcomes).mean,
            }
        )
    others = [(row["ratio"], row) for row in rows if row["system"] != HYBRID.label]
    ratios = [float(str(value)) for value, _ in others]
    worst = min(others, key=lambda pair: float(str(pair[0])))[1]
    return Finding([*_list_claims(ratios, worst), _equality(cases, outcomes)], None, rows, _COLUMNS)


_COLUMNS = (
    Column("platform", "platform"),
    Column("lengths", "lengths", justify="left"),
    Column("load", "load", justify="left"),
    Column("system", "system", justify="left"),
    Column("tok/s", "throughput", ",.0f"),
    Column("hybrid over it", "ratio", ".3f"),
)


def _list_claims(ratios: Sequence[float], worst: Mapping[str, object]) -> list[Claim]:
    where = f"{worst['platform']}, {worst['lengths']}, {worst['load']}, over {worst['system']}"
    return [
        Claim(
            figure="list",
            says=f"hybrid over the four others, worst of {len(ratios)} ({where})",
            paper="ours",
            ours=Spread.of([min(ratios)]),
            form="{:.3f}x",
            at_least=1 - _EQUAL,
            assumption="prediction by the same costs that the simulator has: no error of a profile",
        ),
        Claim(
            figure="list",
            says="the same, geometric mean",
            paper="ours",
            ours=Spread.of([geometric_mean(ratios)]),
            form="{:.3f}x",
            at_least=1.0,
            assumption="the list: how much of it is above what the device can serve",
        ),
    ]


def _equality(cases: Loads, outcomes: Outcomes) -> Claim:
    found = [
        ratio(several, cases[setting, load, DEVICE.label], outcomes).mean
        for (setting, load, _), several in cases.items()
        if load == BELOW
    ]
    return Claim(
        figure="3.4, rule 1",
        says="below the device's capacity: throughput over the device alone, all systems and settings",
        paper="equal",
        ours=Spread(sum(found) / len(found), min(found), max(found)),
        form="{:.3f}x",
        at_least=1 - _EQUAL,
        at_most=1 + _EQUAL,
        assumption="half of what the device alone can serve",
    )


def _small_backlog(platform: Platform, lengths: str, scale: Scale) -> Setting:
    """Several times what the device holds, fewer where answers are long."""
    _, output = mean_lengths(lengths)
    few = (240, 120) if platform == A10 else (80, 40)
    number = few[0] if output < 300 else round(few[0] - (few[0] - few[1]) * min(1.0, (output - 300) / 700))
    return Setting(platform, lengths, number * scale.pick(1, _LONGER))


def _loads(settings: Sequence[Setting], rates: Sequence[float], scale: Scale, run: Run) -> Loads:
    """Each setting's backlog, and the same requests with Poisson arrivals at shares of the device's capacity.

    Every system is tuned with the first seed at the highest rate, and keeps that budget at the lower ones: there any
    budget serves all requests, and unlike budgets would show in latency as unlike policies.
    """
    full: Backlogs = backlogs(settings, scale, run)
    outcomes = run(case for several in full.values() for case in several)
    wanted: dict[tuple[Setting, float | None, str], HostCase] = {}
    for (setting, label), backlog in full.items():
        device: HostOutcome = outcomes[full[setting, DEVICE.label][0]]
        for rate in rates:
            wanted[setting, rate, label] = replace(backlog[0], rate=rate * device.result.requests_per_second)
    seeds = scale.seeds[: scale.pick(1, len(scale.seeds))]
    pairs = list(full)
    highest = tuned([wanted[setting, max(rates), label] for setting, label in pairs], run)
    budgets = {pair: case.system.token_budget for pair, case in zip(pairs, highest, strict=True)}
    loads = {key: over_seeds(with_budget(case, budgets[key[0], key[2]]), seeds) for key, case in wanted.items()}
    return loads | {(setting, None, label): backlog for (setting, label), backlog in full.items()}


# --------------------------------------------------------------------------------------------------------- figure 6


def latency(scale: Scale, run: Run) -> Finding:
    """Figure 6: latency per token, the whole latency of a request over its output tokens, against the rate."""
    places = {
        platform: _small_backlog(platform, name, scale) for platform, name in ((T4, "osc:200"), (A10, "1000:200"))
    }
    cases = _loads(list(places.values()), _RATES, scale, run)
    outcomes = run(case for several in cases.values() for case in several)
    panels = tuple(_latency_panel(setting, cases, outcomes) for setting in places.values())
    rows = [
        {
            "platform": setting.platform.name,
            "rate": load,
            "system": label,
            "latency": 1e3 * spread(several, outcomes, _latency).mean,
        }
        for (setting, load, label), several in cases.items()
        if load is not None
    ]
    columns = (
        Column("platform", "platform"),
        Column("rate over capacity", "rate", ".1f"),
        Column("system", "system", justify="left"),
        Column("latency per token, ms", "latency", ",.0f"),
    )
    claims = [_latency_claim(places[place], paper, most, cases, outcomes) for place, paper, most in _LATENCIES]
    return Finding(claims, Chart(title="APEX, figure 6: latency per token", panels=panels, columns=2), rows, columns)


_LATENCIES: tuple[tuple[Platform, str, float], ...] = ((T4, "nearly half", 0.75), (A10, "slightly below", 1.0))
"""Platform, the paper's word for APEX over NEO, and the most that is asked for."""


def _latency_claim(setting: Setting, paper: str, most: float, cases: Loads, outcomes: Outcomes) -> Claim:
    ours = ratio(cases[setting, ABOVE, APEX.label], cases[setting, ABOVE, NEO.label], outcomes, _latency)
    return Claim(
        figure="6",
        says=f"{setting.platform.name}: latency per token at {ABOVE:.1f} of the device's capacity, APEX over NEO",
        paper=paper,
        ours=ours,
        form="{:.2f}x",
        at_most=most,
        assumption="who has more throughput has shorter queues; a host token by overlap takes layers + 1 steps",
    )


def _latency(outcome: HostOutcome) -> float:
    return outcome.latency_per_token


def _latency_panel(setting: Setting, cases: Loads, outcomes: Outcomes) -> Panel:
    curves = []
    for system in SYSTEMS:
        several = [cases[setting, rate, system.label] for rate in _RATES]
        rates = tuple(case[0].rate or 0.0 for case in several)
        curves.append(
            Curve(
                label=system.label,
                xs=rates,
                ys=tuple(1e3 * spread(mine, outcomes, _latency).mean for mine in several),
            )
        )
    return Panel(
        title=f"{setting.platform.name}, {setting.lengths}",
        x="request rate, 1/s",
        y="latency per token, ms",
        curves=tuple(curves),
    )
