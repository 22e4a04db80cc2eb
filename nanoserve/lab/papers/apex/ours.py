"""Goals of the policies beside the paper's figures: the fixed list for ours, and latency over rates
(figure 6).

The fixed list: both platforms, mean outputs from 50 to 1000, three loads: half of what the device
alone can serve, a fifth more than it can, and everything at once.
"""

from collections.abc import Sequence
from operator import itemgetter
from statistics import geometric_mean
from typing import Any

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.apex.settings import (
    A10,
    ALL_OUTPUTS,
    APEX,
    DEVICE,
    HYBRID,
    NEO,
    OUTPUTS,
    SYSTEMS,
    T4,
    TOKEN_BUDGETS,
    HostBacklog,
    Platform,
    mean_lengths,
)
from nanoserve.lab.papers.apex.throughput import backlogs
from nanoserve.lab.papers.cases import (
    Case,
    Outcome,
    Runs,
    over_seeds,
    throughput,
    tuned,
    with_budget,
)
from nanoserve.lab.papers.claims import Ours, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.record.metrics import Spread

BELOW, ABOVE = 0.5, 1.2  # rates of the fixed list, over what the device alone can serve
_RATES = (0.5, 0.8, 1.0, 1.2)  # figure 6's
_LONGER = 2  # times as many requests at the full size

Loads = Runs[tuple[HostBacklog, float | None, str]]
"""Runs by backlog, load (None for all at once) and label of the system: one case for each seed."""


def fixed_list(scale: Scale, run: Run) -> Finding:
    """HybridByPrediction beside the four that it chooses among; and all of them where memory is no
    constraint."""
    outputs = scale.pick(OUTPUTS, ALL_OUTPUTS)
    lengths = [(A10, f"1000:{output}") for output in outputs] + [
        (T4, f"osc:{output}") for output in outputs
    ]
    runs = _loads(
        [_small_backlog(platform, name, scale) for platform, name in lengths],
        (BELOW, ABOVE),
        scale,
        run,
    )
    rows: list[dict[str, Any]] = []
    for setting, load, label in runs.cases:
        words = "all at once"
        if load is not None:
            words = f"{load:.1f} of capacity"
        row = {
            "platform": setting.platform.name,
            "lengths": setting.lengths,
            "load": words,
            "system": label,
            "throughput": runs.mean((setting, load, label), throughput),
            "ratio": runs.ratio(
                (setting, load, HYBRID.label), (setting, load, label), throughput
            ).mean,
        }
        rows.append(row)
    others = [row for row in rows if row["system"] != HYBRID.label]
    worst = min(others, key=itemgetter("ratio"))
    ours: Ours = {
        "list worst": worst["ratio"],
        "list mean": geometric_mean(row["ratio"] for row in others),
        "list below": Spread.of(
            runs.ratio((setting, load, label), (setting, load, DEVICE.label), throughput).mean
            for setting, load, label in runs.cases
            if load == BELOW
        ),
    }
    where = "{platform}, {lengths}, {load}, over {system}".format_map(worst)
    return Finding(claims("apex", ours, number=len(others), where=where), None, rows)


LIST_COLUMNS = columns(
    ("", "platform"),
    ("<", "lengths", "load", "system"),
    (",.0f", ("tok/s", "throughput")),
    (".3f", ("hybrid over it", "ratio")),
)


def _small_backlog(platform: Platform, lengths: str, scale: Scale) -> HostBacklog:
    """Several times what the device holds, fewer where answers are long."""
    _, output = mean_lengths(lengths)
    most, fewest = 80, 40
    if platform == A10:
        most, fewest = 240, 120
    number = most
    if output >= 300:
        number = round(most - (most - fewest) * min(1.0, (output - 300) / 700))
    return HostBacklog(platform, lengths, number * scale.pick(1, _LONGER))


def _loads(
    settings: Sequence[HostBacklog], rates: Sequence[float], scale: Scale, run: Run
) -> Loads:
    """Each backlog, and the same requests with Poisson arrivals at shares of the device's capacity.

    Every system is tuned with the first seed at the highest rate, and keeps that budget at the
    lower ones: there any budget serves all requests, and unlike budgets would show in latency as
    unlike policies.
    """
    full = backlogs(settings, scale, run)
    wanted: dict[tuple[HostBacklog, float | None, str], Case] = {}
    for (setting, label), backlog in full.cases.items():
        capacity = full.outcomes((setting, DEVICE.label))[0].result.requests_per_second
        for rate in rates:
            wanted[setting, rate, label] = replace(backlog[0], rate=rate * capacity)
    seeds = scale.seeds[: scale.pick(1, len(scale.seeds))]
    pairs = list(full.cases)
    highest = tuned(
        [wanted[setting, max(rates), label] for setting, label in pairs],
        run,
        throughput,
        TOKEN_BUDGETS,
    )
    budgets = {pair: case.system.token_budget for pair, case in zip(pairs, highest, strict=True)}
    jobs = {
        key: over_seeds(with_budget(case, budgets[key[0], key[2]]), seeds)
        for key, case in wanted.items()
    }
    jobs |= {
        (setting, None, label): list(backlog) for (setting, label), backlog in full.cases.items()
    }
    return Runs(run, jobs)


_LATENCIES = {T4: "osc:200", A10: "1000:200"}  # lengths by platform


LATENCY_COLUMNS = columns(
    ("", "platform"),
    (".1f", ("rate over capacity", "rate")),
    ("<", "system"),
    (",.0f", ("latency per token, ms", "latency")),
)


def latency(scale: Scale, run: Run) -> Finding:
    """Figure 6: latency per token, the whole latency of a request over its output tokens, against
    the rate."""
    places = [_small_backlog(platform, name, scale) for platform, name in _LATENCIES.items()]
    runs = _loads(places, _RATES, scale, run)
    rows = [
        {
            "platform": setting.platform.name,
            "rate": load,
            "system": label,
            "latency": runs.mean((setting, load, label), _latency),
        }
        for setting, load, label in runs.cases
        if load is not None
    ]
    ours = {
        f"6 {one.platform.name}": runs.ratio(
            (one, ABOVE, APEX.label), (one, ABOVE, NEO.label), _latency
        )
        for one in places
    }
    panels = []
    for one in places:
        rates = [runs.cases[one, rate, DEVICE.label][0].rate or 0.0 for rate in _RATES]
        heights = {
            each.label: [runs.mean((one, rate, each.label), _latency) for rate in _RATES]
            for each in SYSTEMS
        }
        title = f"{one.platform.name}, {one.lengths}"
        panels.append(panel(title, "request rate, 1/s", "latency per token, ms", rates, heights))
    chart = Chart("APEX, figure 6: latency per token", panels, columns=2)
    return Finding(claims("apex", ours), chart, rows)


def _latency(outcome: Outcome) -> float:
    return 1e3 * outcome.latency_per_token
