"""APEX, sections 5.2 and 5.4: throughput in a backlog (figures 5 and 7), and what the order of systems depends on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.apex.settings import (
    A10,
    APEX,
    APEX_8,
    DEVICE,
    HYBRID,
    NEO,
    NEO_KERNEL,
    OVERLAP,
    PAPERS_SHARE,
    SYSTEMS,
    T4,
    TOKEN_BUDGETS,
    HostCase,
    Platform,
    throughput,
)
from nanoserve.papers.cases import Runs, System, over_seeds, tuned
from nanoserve.papers.charts import Chart, Panel, panel
from nanoserve.papers.claims import ClaimRow, Spread, claims
from nanoserve.papers.framework import Finding, Run, Scale

OUTPUTS = (50, 200, 500, 1000)
ALL_OUTPUTS = (50, 100, 200, 300, 500, 700, 1000)
_WORKLOADS = {"livebench": (1.22, 1.06), "azure-conv": (1.11, 1.13), "dolphin-r1": (1.20, 1.16)}
"""Figure 5b: gains of APEX over the device alone and over NEO."""
_ABSOLUTE, _RELATIVE = "tokens/s", "throughput over the device alone"
_COMPARED = (DEVICE, NEO, NEO_KERNEL, OVERLAP, APEX, HYBRID)

_RAMP = "the backlog: until the host has some ten sequences for each on the device, and at the end, the CPU is idle"
_PRINTED = "algorithm 1 asks whether asymmetric pipelining beats the device alone, never whether overlap does more"
_KERNEL = "the CPUs attend half as fast for NEO (section 4.1)"
_UP_TO = "1.71x (abstract: 1.49x)"
_NOT_IN_LIST = "not of the list that hybrid was made with, but two faults of all host policies were found on these rows"
_SIZE = "a device without host memory preempts and computes again; every system with its best token budget"


@dataclass(frozen=True)
class HostBacklog:
    """A platform and the requests that come to it at once."""

    platform: Platform
    lengths: str
    """See ``draw_lengths``."""
    requests: int
    """How many."""
    processor: float | None = None
    """Share of the CPUs' data sheet that attention reaches; None is the default."""
    systems: tuple[System, ...] = SYSTEMS
    """That are compared."""

    def cases(self, scale: Scale) -> list[HostCase]:
        """The closed batch, for every system with the first seed, not tuned yet."""
        return [
            HostCase(
                system=system,
                platform=self.platform,
                lengths=self.lengths,
                requests=self.requests,
                processor=self._processor(system),
                seed=scale.seeds[0],
            )
            for system in self.systems
        ]

    def _processor(self, system: System) -> float | None:
        if system is DEVICE or self.processor is None:
            return None
        return self.processor / 2 if system is NEO_KERNEL else self.processor


Backlogs = Runs[tuple[HostBacklog, str], HostCase]
"""By backlog and label of the system: one case for each seed, with the system's best token budget."""


def large_backlog(platform: Platform, lengths: str, scale: Scale) -> HostBacklog:
    """Where the CPUs are as slow as in the paper: 30 times what an A10 holds, or 100 times what a T4 does."""
    requests = scale.pick(1000, 3000) if platform == A10 else scale.pick(300, 1000)
    return HostBacklog(platform, lengths, requests, PAPERS_SHARE, _COMPARED)


def figure_7_settings(scale: Scale) -> list[HostBacklog]:
    """A10, mean input 1000."""
    return [large_backlog(A10, f"1000:{output}", scale) for output in scale.pick(OUTPUTS, ALL_OUTPUTS)]


def osc_settings(scale: Scale) -> list[HostBacklog]:
    """T4, the lengths of OSC with outputs of another mean."""
    return [large_backlog(T4, f"osc:{output}", scale) for output in scale.pick(OUTPUTS[:3], ALL_OUTPUTS)]


def backlogs(
    settings: Sequence[HostBacklog], scale: Scale, run: Run, budgets: Sequence[int] = TOKEN_BUDGETS
) -> Backlogs:
    """Every system in every backlog, tuned with the first seed, then run with all."""
    cases = [case for one in settings for case in one.cases(scale)]
    pairs = [(one, system.label) for one in settings for system in one.systems]
    found = zip(pairs, tuned(cases, run, throughput, budgets), strict=True)
    return Runs(run, {pair: over_seeds(case, scale.seeds) for pair, case in found})


# ------------------------------------------------------------------------------------------------------ figures 5, 7


def _large_backlogs(settings: Sequence[HostBacklog], scale: Scale, run: Run) -> Backlogs:
    """One seed; at the reduced size with the smaller budget, the better one where CPUs are slow."""
    return backlogs(settings, scale.first_seed, run, scale.pick(TOKEN_BUDGETS[:1], TOKEN_BUDGETS))


def throughput_figure(scale: Scale, run: Run) -> Finding:
    """Figure 5: (a) T4 with OSC's inputs and outputs of varied length, (b) A10 with three workloads."""
    on_t4, on_a10 = osc_settings(scale), [large_backlog(A10, name, scale) for name in _WORKLOADS]
    runs = _large_backlogs([*on_t4, *on_a10], scale, run)
    heights = {one.label: [runs.spread((place, one.label), throughput) for place in on_a10] for one in _COMPARED}
    panels = [
        _over_outputs("(a) T4, LLaMA-2-7B, OSC", on_t4, runs, relative=False),
        panel("(b) A10, LLaMA-3.1-8B", "workload", _ABSOLUTE, [*_WORKLOADS], heights, kind="bar"),
    ]
    chart = Chart("APEX, figure 5: throughput in a backlog", panels, columns=1)
    found = [*claims("5a", _t4_claims(on_t4, runs)), *claims("5b", _a10_claims(on_a10, runs))]
    return Finding(found, chart, _rows(runs), _COLUMNS)


def _over(above: System, below: System, setting: HostBacklog, runs: Backlogs) -> Spread:
    """One system's throughput over another's."""
    return runs.ratio((setting, above.label), (setting, below.label), throughput)


def _t4_claims(settings: Sequence[HostBacklog], runs: Backlogs) -> list[ClaimRow]:
    rows: list[ClaimRow] = []
    for other, paper, asked, assumption in (
        (DEVICE, "1.96x", "at least 1.48x", _SIZE),
        (NEO, _UP_TO, "at least 1.25x", _PRINTED),
        (NEO_KERNEL, _UP_TO, "at least 1.25x", _KERNEL),
    ):
        gains = {one: _over(APEX, other, one, runs) for one in settings}
        best = max(settings, key=lambda one: gains[one].mean)
        says = f"APEX over {other.label}, at most ({best.lengths})"
        rows.append((says, paper, gains[best], asked, assumption))
    return rows


def _a10_claims(settings: Sequence[HostBacklog], runs: Backlogs) -> list[ClaimRow]:
    rows: list[ClaimRow] = []
    for one in settings:
        over_device, over_neo = _WORKLOADS[one.lengths]
        for other, paper, assumption in (
            (DEVICE, over_device, _SIZE),
            (NEO, over_neo, _RAMP),
            (NEO_KERNEL, over_neo, _KERNEL),
        ):
            says, asked = f"{one.lengths}: APEX over {other.label}", ("{:.2f}x", 1 + (paper - 1) / 2, None)
            rows.append((says, f"{paper:.2f}x", _over(APEX, other, one, runs), asked, assumption))
        says, ours = f"{one.lengths}: hybrid over {DEVICE.label}", _over(HYBRID, DEVICE, one, runs)
        rows.append((says, "ours", ours, "at least 0.98x", _NOT_IN_LIST))
    return rows


def output_lengths(scale: Scale, run: Run) -> Finding:
    """Figure 7: A10, mean input 1000, outputs from 50 to 1000; throughput over the device-only one."""
    settings = figure_7_settings(scale)
    runs = _large_backlogs(settings, scale, run)
    by_output = {int(one.lengths.partition(":")[2]): one for one in settings}

    def over(output: int, above: System, below: System) -> Spread:
        return _over(above, below, by_output[output], runs)

    rows: list[ClaimRow] = [
        (f"outputs of {output}: APEX over {neo.label}", paper, over(output, APEX, neo), asked, assumption)
        for output, paper, asked in (
            (50, "1.05x", "at least 1.02x"),
            (200, "1.05x", "at least 1.02x"),
            (500, "1.31x", "at least 1.15x"),
            (1000, "1.37x", "at least 1.18x"),
        )
        for neo, assumption in ((NEO, _RAMP), (NEO_KERNEL, _KERNEL))
    ]
    rows += [
        (f"outputs of 1000: {one.label} over {below}", paper, over(1000, one, other), asked, assumption)
        for one, other, below, paper, asked, assumption in (
            (OVERLAP, NEO, NEO.label, "1.37x", "at least 1.10x", _RAMP),
            (OVERLAP, DEVICE, DEVICE.label, "up to 1.89x", "at least 1.20x", _RAMP),
            (APEX, DEVICE, "the device alone", "up to 1.89x", "at least 1.45x", _SIZE),
        )
    ]
    rows.append(
        (
            "gain over the device alone grows with outputs: hybrid, outputs of 1000 over 50",
            "grows, then levels off",
            over(1000, HYBRID, DEVICE),
            ("{:.2f}x", over(50, HYBRID, DEVICE).high, None),
            "the share of time in decodes, and what memory they take",
        )
    )
    curves = _over_outputs("A10, LLaMA-3.1-8B, mean input 1000", settings, runs, relative=True)
    chart = Chart("APEX, figure 7: throughput by output length", [curves])
    return Finding(claims("7", rows), chart, _rows(runs), _COLUMNS)


_COLUMNS = (
    Column("platform", "platform"),
    Column("lengths", "lengths", justify="left"),
    Column("system", "system", justify="left"),
    Column("budget", "budget", ",d"),
    Column("tok/s", "throughput", ",.0f"),
    Column("over device only", "over_device", ".2f"),
    Column("of host sequences, %", "host_share", ".0f"),
    Column("CPU busy, %", "processor", ".0f"),
    Column("preemptions", "preemptions", ",d"),
    Column("TPOT, ms", "tpot", ",.0f"),
)


def _rows(runs: Backlogs) -> list[dict[str, object]]:
    rows = []
    for (setting, label), several in runs.jobs.items():
        result = runs.outcomes((setting, label))[0].result
        rows.append(
            {
                "platform": setting.platform.name,
                "lengths": setting.lengths,
                "system": label,
                "budget": several[0].system.token_budget,
                "throughput": runs.mean((setting, label), throughput),
                "over_device": runs.ratio((setting, label), (setting, DEVICE.label), throughput).mean,
                "host_share": 100 * result.host_tokens / result.output_tokens,
                "processor": 100 * result.processor_share,
                "preemptions": result.preemptions,
                "tpot": result.tpot_ms.mean if result.tpot_ms else None,
                "steps": result.strategy_steps,
            }
        )
    return rows


def _over_outputs(title: str, settings: Sequence[HostBacklog], runs: Backlogs, *, relative: bool) -> Panel:
    """Throughput against the mean output, or its ratio to that of the device alone."""
    heights = {
        system.label: [
            _over(system, DEVICE, one, runs) if relative else runs.spread((one, system.label), throughput)
            for one in settings
        ]
        for system in _COMPARED
    }
    outputs = [float(one.lengths.partition(":")[2]) for one in settings]
    return panel(title, "mean output, tokens", _RELATIVE if relative else _ABSOLUTE, outputs, heights)


# ------------------------------------------------------------------------------- what the order of systems depends on

_SHARES = (0.05, PAPERS_SHARE, 0.2, 0.6)
_OVER_SHARES = (NEO, OVERLAP, APEX, APEX_8, HYBRID)
_PLACES = ((A10, "1000:300"), (T4, "osc:200"))
_BOUND = "how many sequences the host has, and Tgatt / Tlin: see figure bounds for what there is to gain"


def processors(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: throughput by the share of the CPUs' data sheet that attention reaches."""
    settings = [
        replace(large_backlog(platform, lengths, scale), processor=share, systems=(DEVICE, *_OVER_SHARES))
        for platform, lengths in _PLACES
        for share in _SHARES
    ]
    runs = backlogs(settings, scale.first_seed, run)
    rows = [
        {
            "platform": setting.platform.name,
            "system": label,
            "share": setting.processor,
            "budget": several[0].system.token_budget,
            "throughput": runs.mean((setting, label), throughput),
            "over_device": runs.ratio((setting, label), (setting, DEVICE.label), throughput).mean,
            "over_neo": runs.ratio((setting, label), (setting, NEO.label), throughput).mean,
            "processor": 100 * runs.outcomes((setting, label))[0].result.processor_share,
        }
        for (setting, label), several in runs.jobs.items()
    ]
    columns = (
        Column("platform", "platform"),
        Column("system", "system", justify="left"),
        Column("CPU share", "share", ".2f"),
        Column("budget", "budget", ",d"),
        Column("tok/s", "throughput", ",.0f"),
        Column("over device only", "over_device", ".2f"),
        Column("over NEO", "over_neo", ".2f"),
        Column("CPU busy, %", "processor", ".0f"),
    )
    panels = [
        panel(
            f"{platform.name}, {platform.model}, {lengths}",
            "share of the CPUs' data sheet, %",
            _RELATIVE,
            [100 * share for share in _SHARES],
            {
                system.label: [_over(system, DEVICE, one, runs).mean for one in settings if one.platform == platform]
                for system in _OVER_SHARES
            },
            log_x=True,
            log_y=True,
            marks=(1.0,),
        )
        for platform, lengths in _PLACES
    ]
    chart = Chart("How fast the CPUs attend", panels, columns=2)
    return Finding(claims("cpu", _processor_claims(settings, runs)), chart, rows, columns)


def _processor_claims(settings: Sequence[HostBacklog], runs: Backlogs) -> list[ClaimRow]:
    """Where the CPUs are a tenth as fast as the device; and beside NEO with its own kernel, half as fast."""
    places = {(one.platform, one.processor): one for one in settings}
    rows: list[ClaimRow] = []
    for platform, over_neo, over_device in (
        (A10, "1.05x to 1.37x", "1.11x to 1.89x"),
        (T4, "up to 1.71x", "1.84x to 1.96x"),
    ):
        for system, other, paper, asked in (
            (OVERLAP, NEO, over_neo, "at least 1.10x"),
            (APEX, NEO, over_neo, "at least 1.10x"),
            (HYBRID, NEO, over_neo, "at least 1.10x"),
            (APEX, NEO_KERNEL, over_neo, "at least 1.10x"),
            (OVERLAP, DEVICE, over_device, "at least 1.20x"),
            (HYBRID, DEVICE, over_device, "at least 1.20x"),
        ):
            share, label = (PAPERS_SHARE / 2, NEO.label) if other is NEO_KERNEL else (PAPERS_SHARE, other.label)
            above, below = (places[platform, PAPERS_SHARE], system.label), (places[platform, share], label)
            says = f"{platform.name}, CPUs a tenth as fast as the device: {system.label} over {other.label}"
            rows.append((says, paper, runs.ratio(above, below, throughput), asked, _BOUND))
    return rows
