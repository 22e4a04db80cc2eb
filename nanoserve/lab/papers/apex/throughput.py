"""APEX, sections 5.2 and 5.4: throughput in a backlog (figures 5 and 7), and what the order of
systems depends on."""

from collections.abc import Sequence
from dataclasses import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, Panel, panel
from nanoserve.lab.papers.apex.settings import (
    A10,
    ALL_OUTPUTS,
    APEX,
    APEX_8,
    COMPARED,
    DEVICE,
    HYBRID,
    NEO,
    NEO_KERNEL,
    OUTPUTS,
    OVERLAP,
    PAPERS_SHARE,
    T4,
    TOKEN_BUDGETS,
    HostBacklog,
    large_backlog,
)
from nanoserve.lab.papers.cases import Runs, System, over_seeds, throughput, tuned
from nanoserve.lab.papers.claims import Ours, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.record.metrics import Distribution, Spread

_WORKLOADS = ("livebench", "azure-conv", "dolphin-r1")
_ABSOLUTE, _RELATIVE = "tokens/s", "throughput over the device alone"

Backlogs = Runs[tuple[HostBacklog, str]]
"""Runs by backlog and label of the system: one case for each seed, with the system's best token
budget."""


def backlogs(
    settings: Sequence[HostBacklog], scale: Scale, run: Run, budgets: Sequence[int] = TOKEN_BUDGETS
) -> Backlogs:
    """Every system in every backlog, tuned with the first seed, then run with all."""
    cases = {
        (one, system.label): one.case(system, scale.seeds[0])
        for one in settings
        for system in one.systems
    }
    found = zip(cases, tuned(list(cases.values()), run, throughput, budgets), strict=True)
    return Runs(run, {key: over_seeds(case, scale.seeds) for key, case in found})


def _large_backlogs(settings: Sequence[HostBacklog], scale: Scale, run: Run) -> Backlogs:
    """One seed; at the reduced size with the smaller budget, the better one where CPUs are slow."""
    return backlogs(settings, scale.first_seed, run, _budgets(scale))


def _budgets(scale: Scale) -> Sequence[int]:
    return scale.pick(TOKEN_BUDGETS[:1], TOKEN_BUDGETS)


def _said_budgets(scale: Scale) -> str:
    """How the claims name the token budgets that were tried."""
    several = " and ".join(map(str, _budgets(scale)))
    return scale.pick(
        f"every system with a token budget of {several}",
        f"every system with the better of {several}",
    )


def throughput_figure(scale: Scale, run: Run) -> Finding:
    """Figure 5: (a) T4 with OSC's inputs and outputs of varied length, (b) A10 with three
    workloads."""
    on_t4 = [
        large_backlog(T4, f"osc:{output}", scale) for output in scale.pick(OUTPUTS[:3], ALL_OUTPUTS)
    ]
    on_a10 = [large_backlog(A10, name, scale) for name in _WORKLOADS]
    runs = _large_backlogs(on_t4 + on_a10, scale, run)
    heights = {
        one.label: [runs.spread((place, one.label), throughput) for place in on_a10]
        for one in COMPARED
    }
    panels = [
        _over_outputs("(a) T4, LLaMA-2-7B, OSC", on_t4, runs, relative=False),
        panel("(b) A10, LLaMA-3.1-8B", "workload", _ABSOLUTE, _WORKLOADS, heights, kind="bar"),
    ]
    chart = Chart("APEX, figure 5: throughput in a backlog", panels, columns=1)
    ours: Ours = {}
    best = {}
    for word, other in (("device", DEVICE), ("neo", NEO), ("kernel", NEO_KERNEL)):
        gains = {one.lengths: _over(APEX, other, one, runs) for one in on_t4}
        best[word], ours[f"5a {other.label}"] = max(gains.items(), key=lambda pair: pair[1].mean)
    for one in on_a10:
        for other in (DEVICE, NEO, NEO_KERNEL):
            ours[f"5b {one.lengths}: {other.label}"] = _over(APEX, other, one, runs)
        ours[f"5b {one.lengths}: hybrid"] = _over(HYBRID, DEVICE, one, runs)
    return Finding(claims("apex", ours, budgets=_said_budgets(scale), **best), chart, _rows(runs))


def _over(above: System, below: System, setting: HostBacklog, runs: Backlogs) -> Spread:
    """One system's throughput over another's."""
    return runs.ratio((setting, above.label), (setting, below.label), throughput)


def output_lengths(scale: Scale, run: Run) -> Finding:
    """Figure 7: A10, mean input 1000, outputs from 50 to 1000; throughput over the device-only
    one."""
    settings = [
        large_backlog(A10, f"1000:{output}", scale) for output in scale.pick(OUTPUTS, ALL_OUTPUTS)
    ]
    runs = _large_backlogs(settings, scale, run)
    by_output = {int(one.lengths.partition(":")[2]): one for one in settings}
    compared = [(output, APEX, neo) for output in OUTPUTS for neo in (NEO, NEO_KERNEL)]
    compared += [(1000, OVERLAP, NEO), (1000, OVERLAP, DEVICE), (1000, APEX, DEVICE)]
    ours: Ours = {
        f"7 {output}: {above.label} over {below.label}": _over(
            above, below, by_output[output], runs
        )
        for output, above, below in compared
    }
    ours["7 grows"] = _over(HYBRID, DEVICE, by_output[1000], runs)
    longest = by_output[1000]
    found = claims(
        "apex",
        ours,
        budgets=_said_budgets(scale),
        gain=_over(HYBRID, DEVICE, by_output[50], runs).high,
        over_device=f"{_over(APEX, DEVICE, longest, runs).mean:.2f}",
        neo=f"{_over(NEO, DEVICE, longest, runs).mean:.2f}",
        kernel=f"{_over(NEO_KERNEL, DEVICE, longest, runs).mean:.2f}",
        over_kernel=f"{_over(APEX, NEO_KERNEL, longest, runs).mean:.2f}",
    )
    curves = _over_outputs("A10, LLaMA-3.1-8B, mean input 1000", settings, runs, relative=True)
    chart = Chart("APEX, figure 7: throughput by output length", [curves])
    return Finding(found, chart, _rows(runs))


BACKLOG_COLUMNS = columns(
    ("", "platform"),
    ("<", "lengths", "system"),
    (",d", "budget"),
    (",.0f", ("tok/s", "throughput")),
    (".2f", ("over device only", "over_device")),
    (".0f", ("of host sequences, %", "host_share"), ("CPU busy, %", "processor")),
    (",d", "preemptions"),
    (",.0f", ("TPOT, ms", "tpot")),
)


def _rows(runs: Backlogs) -> list[dict[str, object]]:
    results = {key: runs.outcomes(key)[0].result for key in runs.cases}
    return [
        {
            "platform": setting.platform.name,
            "lengths": setting.lengths,
            "system": label,
            "share": setting.processor,
            "budget": runs.cases[setting, label][0].system.token_budget,
            "throughput": runs.mean((setting, label), throughput),
            "over_device": runs.ratio((setting, label), (setting, DEVICE.label), throughput).mean,
            "host_share": 100 * result.host_tokens / result.output_tokens,
            "processor": 100 * result.processor_share,
            "preemptions": result.preemptions,
            "tpot": _mean(result.tpot_ms),
            "steps": result.strategy_steps,
        }
        for (setting, label), result in results.items()
    ]


def _mean(found: Distribution | None) -> float | None:
    if found is None:
        return None
    return found.mean


def _over_outputs(
    title: str, settings: Sequence[HostBacklog], runs: Backlogs, *, relative: bool
) -> Panel:
    """Throughput against the mean output, or its ratio to that of the device alone."""
    outputs = [float(one.lengths.partition(":")[2]) for one in settings]
    x = "mean output, tokens"
    if relative:
        ratios = {
            system.label: [_over(system, DEVICE, one, runs) for one in settings]
            for system in COMPARED
        }
        return panel(title, x, _RELATIVE, outputs, ratios)
    heights = {
        system.label: [runs.spread((one, system.label), throughput) for one in settings]
        for system in COMPARED
    }
    return panel(title, x, _ABSOLUTE, outputs, heights)


_SHARES = (0.05, PAPERS_SHARE, 0.2, 0.6)
_OVER_SHARES = (NEO, OVERLAP, APEX, APEX_8, HYBRID)
_PLACES = ((A10, "1000:300"), (T4, "osc:200"))
_WITH_SLOW_CPUS = (
    (OVERLAP, NEO),
    (APEX, NEO),
    (HYBRID, NEO),
    (APEX, NEO_KERNEL),
    (OVERLAP, DEVICE),
    (HYBRID, DEVICE),
)
"""Pairs of systems that are compared where the CPUs are a tenth as fast as the device."""


PROCESSOR_COLUMNS = columns(
    ("", "platform"),
    ("<", "system"),
    (".2f", ("CPU share", "share")),
    (",d", "budget"),
    (",.0f", ("tok/s", "throughput")),
    (".2f", ("over device only", "over_device"), ("over NEO", "over_neo")),
    (".0f", ("CPU busy, %", "processor")),
)


def processors(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: throughput by the share of the CPUs' data sheet that attention
    reaches."""
    settings = [
        replace(
            large_backlog(platform, lengths, scale),
            processor=share,
            systems=(DEVICE,) + _OVER_SHARES,
        )
        for platform, lengths in _PLACES
        for share in _SHARES
    ]
    runs = backlogs(settings, scale.first_seed, run)
    rows = _rows(runs)
    for row, (setting, label) in zip(rows, runs.cases, strict=True):
        row["over_neo"] = runs.ratio((setting, label), (setting, NEO.label), throughput).mean
    panels = []
    for platform, lengths in _PLACES:
        here = [one for one in settings if one.platform == platform]
        heights = {
            system.label: [_over(system, DEVICE, one, runs).mean for one in here]
            for system in _OVER_SHARES
        }
        title = f"{platform.name}, {platform.model}, {lengths}"
        x = "share of the CPUs' data sheet, %"
        shares = [100 * share for share in _SHARES]
        panels.append(
            panel(title, x, _RELATIVE, shares, heights, log_x=True, log_y=True, marks=(1.0,))
        )
    chart = Chart("How fast the CPUs attend", panels, columns=2)
    return Finding(claims("apex", _with_slow_cpus(settings, runs)), chart, rows)


def _with_slow_cpus(settings: Sequence[HostBacklog], runs: Backlogs) -> Ours:
    """NEO with its own kernel is NEO with CPUs half as fast."""
    places = {(one.platform, one.processor): one for one in settings}
    ours: Ours = {}
    for platform, _ in _PLACES:
        for above, below in _WITH_SLOW_CPUS:
            share, other = PAPERS_SHARE, below
            if below is NEO_KERNEL:
                share, other = PAPERS_SHARE / 2, NEO
            mine, theirs = (
                (places[platform, PAPERS_SHARE], above.label),
                (places[platform, share], other.label),
            )
            ours[f"cpu {platform.name}: {above.label} over {below.label}"] = runs.ratio(
                mine, theirs, throughput
            )
    return ours
