"""APEX, sections 5.2 and 5.4: throughput in a backlog (figures 5 and 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.apex.settings import (
    A10,
    APEX,
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
    HostOutcome,
    Platform,
    ratio,
    throughput,
    tuned,
)
from nanoserve.papers.cases import System
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Outcomes, Run, Scale
from nanoserve.papers.tuning import over_seeds, spread

OUTPUTS = (50, 200, 500, 1000)
ALL_OUTPUTS = (50, 100, 200, 300, 500, 700, 1000)
_WORKLOADS = ("livebench", "azure-conv", "dolphin-r1")
_ABSOLUTE, _RELATIVE = "tokens/s", "throughput over the device alone"
_COMPARED = (DEVICE, NEO, NEO_KERNEL, OVERLAP, APEX, HYBRID)

_RAMP = "the backlog: until the host has some ten sequences for each on the device, and at the end, the CPU is idle"
_PRINTED = "algorithm 1 asks whether asymmetric pipelining beats the device alone, never whether overlap does more"
_KERNEL = "the CPUs attend half as fast for NEO (section 4.1)"
_UP_TO = "1.71x (abstract: 1.49x)"
_NOT_IN_LIST = "not of the list that hybrid was made with, but two faults of all host policies were found on these rows"
_SIZE = "a device without host memory preempts and computes again; every system with its best token budget"


@dataclass(frozen=True)
class Setting:
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


Backlogs = Mapping[tuple[Setting, str], Sequence[HostCase]]
"""By setting and label of the system: one case for each seed, with the system's best token budget."""


def large_backlog(platform: Platform, lengths: str, scale: Scale) -> Setting:
    """Where the CPUs are as slow as in the paper: 30 times what an A10 holds, or 100 times what a T4 does."""
    requests = scale.pick(1000, 3000) if platform == A10 else scale.pick(300, 1000)
    return Setting(platform, lengths, requests, PAPERS_SHARE, _COMPARED)


def figure_7_settings(scale: Scale) -> list[Setting]:
    """A10, mean input 1000."""
    return [large_backlog(A10, f"1000:{output}", scale) for output in scale.pick(OUTPUTS, ALL_OUTPUTS)]


def osc_settings(scale: Scale) -> list[Setting]:
    """T4, the lengths of OSC with outputs of another mean."""
    return [large_backlog(T4, f"osc:{output}", scale) for output in scale.pick(OUTPUTS[:3], ALL_OUTPUTS)]


def large_backlogs(settings: Sequence[Setting], scale: Scale, run: Run) -> Backlogs:
    """Of one seed; at the reduced size with the smaller budget, the better one where CPUs are slow."""
    return backlogs(settings, scale.first_seed, run, scale.pick(TOKEN_BUDGETS[:1], TOKEN_BUDGETS))


def backlogs(settings: Sequence[Setting], scale: Scale, run: Run, budgets: Sequence[int] = TOKEN_BUDGETS) -> Backlogs:
    """Every system in every setting, tuned with the first seed, then run with all."""
    found = tuned([case for setting in settings for case in setting.cases(scale)], run, budgets)
    pairs = [(setting, system.label) for setting in settings for system in setting.systems]
    return {pair: over_seeds(case, scale.seeds) for pair, case in zip(pairs, found, strict=True)}


# ------------------------------------------------------------------------------------------------------ figures 5, 7


def throughput_figure(scale: Scale, run: Run) -> Finding:
    """Figure 5: (a) T4 with OSC's inputs and outputs of varied length, (b) A10 with three workloads."""
    on_t4, on_a10 = osc_settings(scale), [large_backlog(A10, name, scale) for name in _WORKLOADS]
    cases = large_backlogs([*on_t4, *on_a10], scale, run)
    outcomes = run(case for several in cases.values() for case in several)
    panels = (
        _over_outputs("(a) T4, LLaMA-2-7B, OSC", on_t4, cases, outcomes, _ABSOLUTE),
        _over_workloads(on_a10, cases, outcomes),
    )
    chart = Chart(title="APEX, figure 5: throughput in a backlog", panels=panels, columns=1)
    claims = [*_t4_claims(on_t4, cases, outcomes), *_a10_claims(on_a10, cases, outcomes)]
    return Finding(claims, chart, _rows(cases, outcomes), _COLUMNS)


def output_lengths(scale: Scale, run: Run) -> Finding:
    """Figure 7: A10, mean input 1000, outputs from 50 to 1000; throughput over the device-only one."""
    settings = figure_7_settings(scale)
    cases = large_backlogs(settings, scale, run)
    outcomes = run(case for several in cases.values() for case in several)
    panel = _over_outputs("A10, LLaMA-3.1-8B, mean input 1000", settings, cases, outcomes, _RELATIVE)
    chart = Chart(title="APEX, figure 7: throughput by output length", panels=(panel,))

    def over_neo(output: int, paper: str, least: float, neo: System, assumption: str) -> Claim:
        ours = _at(output, APEX, neo, settings, cases, outcomes)
        return _claim("7", f"outputs of {output}: APEX over {neo.label}", paper, ours, least, assumption)

    claims = [
        over_neo(output, paper, least, neo, assumption)
        for output, paper, least in (
            (50, "1.05x", 1.02),
            (200, "1.05x", 1.02),
            (500, "1.31x", 1.15),
            (1000, "1.37x", 1.18),
        )
        for neo, assumption in ((NEO, _RAMP), (NEO_KERNEL, _KERNEL))
    ]
    claims += [
        _claim("7", f"outputs of 1000: overlap over {other.label}", paper, ours, least, _RAMP)
        for other, paper, least in ((NEO, "1.37x", 1.1), (DEVICE, "up to 1.89x", 1.2))
        for ours in [_at(1000, OVERLAP, other, settings, cases, outcomes)]
    ]
    against_device = _at(1000, APEX, DEVICE, settings, cases, outcomes)
    claims.append(
        _claim("7", "outputs of 1000: APEX over the device alone", "up to 1.89x", against_device, 1.45, _SIZE)
    )
    claims.append(
        _claim(
            "7",
            "gain over the device alone grows with outputs: hybrid, outputs of 1000 over 50",
            "grows, then levels off",
            _at(1000, HYBRID, DEVICE, settings, cases, outcomes),
            _at(50, HYBRID, DEVICE, settings, cases, outcomes).high,
            "the share of time in decodes, and what memory they take",
        )
    )
    return Finding(claims, chart, _rows(cases, outcomes), _COLUMNS)


def _t4_claims(settings: Sequence[Setting], cases: Backlogs, outcomes: Outcomes) -> list[Claim]:
    def best(label: str) -> tuple[Setting, Spread]:
        found = {one: ratio(cases[one, APEX.label], cases[one, label], outcomes) for one in settings}
        return max(found.items(), key=lambda pair: pair[1].mean)

    claims = []
    for other, paper, least, assumption in (
        (DEVICE, "1.96x", 1.48, _SIZE),
        (NEO, _UP_TO, 1.25, _PRINTED),
        (NEO_KERNEL, _UP_TO, 1.25, _KERNEL),
    ):
        setting, ours = best(other.label)
        says = f"APEX over {other.label}, at most ({setting.lengths})"
        claims.append(_claim("5a", says, paper, ours, least, assumption))
    return claims


def _a10_claims(settings: Sequence[Setting], cases: Backlogs, outcomes: Outcomes) -> list[Claim]:
    claims = []
    papers = {"livebench": (1.22, 1.06), "azure-conv": (1.11, 1.13), "dolphin-r1": (1.20, 1.16)}
    for setting in settings:
        name = setting.lengths
        over_device, over_neo = papers[name]
        for other, paper, assumption in (
            (DEVICE, over_device, _SIZE),
            (NEO, over_neo, _RAMP),
            (NEO_KERNEL, over_neo, _KERNEL),
        ):
            ours = ratio(cases[setting, APEX.label], cases[setting, other.label], outcomes)
            least = 1 + (paper - 1) / 2
            claims.append(_claim("5b", f"{name}: APEX over {other.label}", f"{paper:.2f}x", ours, least, assumption))
        ours = ratio(cases[setting, HYBRID.label], cases[setting, DEVICE.label], outcomes)
        claims.append(_claim("5b", f"{name}: hybrid over {DEVICE.label}", "ours", ours, 0.98, _NOT_IN_LIST))
    return claims


def _claim(figure: str, says: str, paper: str, ours: Spread, least: float, assumption: str) -> Claim:
    return Claim(
        figure=figure, says=says, paper=paper, ours=ours, form="{:.2f}x", at_least=least, assumption=assumption
    )


def _at(
    output: int, above: System, below: System, settings: Sequence[Setting], cases: Backlogs, outcomes: Outcomes
) -> Spread:
    """One system's throughput over another's where outputs have that mean."""
    (setting,) = (one for one in settings if one.lengths == f"1000:{output}")
    return ratio(cases[setting, above.label], cases[setting, below.label], outcomes)


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


def _rows(cases: Backlogs, outcomes: Outcomes) -> list[dict[str, object]]:
    rows = []
    for (setting, label), several in cases.items():
        first: HostOutcome = outcomes[several[0]]
        result = first.result
        rows.append(
            {
                "platform": setting.platform.name,
                "lengths": setting.lengths,
                "system": label,
                "budget": several[0].system.token_budget,
                "throughput": spread(several, outcomes, throughput).mean,
                "over_device": ratio(several, cases[setting, DEVICE.label], outcomes).mean,
                "host_share": 100 * result.host_tokens / result.output_tokens,
                "processor": 100 * result.processor_share,
                "preemptions": result.preemptions,
                "tpot": result.tpot_ms.mean if result.tpot_ms else None,
                "steps": result.strategy_steps,
            }
        )
    return rows


def _over_outputs(title: str, settings: Sequence[Setting], cases: Backlogs, outcomes: Outcomes, y: str) -> Panel:
    """Throughput against the mean output; over that of the device alone unless ``y`` counts tokens."""
    curves = []
    for system in _COMPARED:
        several = [cases[setting, system.label] for setting in settings]
        if y == _RELATIVE:
            bases = [cases[setting, DEVICE.label] for setting in settings]
            spreads = [ratio(mine, base, outcomes) for mine, base in zip(several, bases, strict=True)]
        else:
            spreads = [spread(mine, outcomes, throughput) for mine in several]
        curves.append(
            Curve(
                label=system.label,
                xs=tuple(float(setting.lengths.partition(":")[2]) for setting in settings),
                ys=tuple(one.mean for one in spreads),
                lows=tuple(one.low for one in spreads),
                highs=tuple(one.high for one in spreads),
            )
        )
    return Panel(title=title, x="mean output, tokens", y=y, curves=tuple(curves))


def _over_workloads(settings: Sequence[Setting], cases: Backlogs, outcomes: Outcomes) -> Panel:
    curves = []
    for system in _COMPARED:
        spreads = [spread(cases[setting, system.label], outcomes, throughput) for setting in settings]
        curves.append(
            Curve(
                label=system.label,
                xs=_WORKLOADS,
                ys=tuple(one.mean for one in spreads),
                lows=tuple(one.low for one in spreads),
                highs=tuple(one.high for one in spreads),
            )
        )
    return Panel(title="(b) A10, LLaMA-3.1-8B", x="workload", y=_ABSOLUTE, curves=tuple(curves), kind="bar")
