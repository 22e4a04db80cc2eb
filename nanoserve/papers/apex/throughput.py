"""APEX, sections 5.2 and 5.4: throughput in a backlog (figures 5 and 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from nanoserve.papers.cases import System
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Outcomes, Run, Scale
from nanoserve.papers.tuning import over_seeds, spread

OUTPUTS = (50, 200, 500, 1000)
_ALL_OUTPUTS = (50, 100, 200, 300, 500, 700, 1000)
_WORKLOADS = ("livebench", "azure-conv", "dolphin-r1")
_ABSOLUTE, _RELATIVE = "tokens/s", "throughput over the device alone"
_LONGER = 2
"""Times as many requests at the full size."""

_ORDER = (
    "asymmetric pipelining pays wherever host sequences are many: at 60 % of the data sheets the CPUs attend half as "
    "fast as the device, not a tenth as in the paper: see figure cpu"
)
_NOT_IN_LIST = "not of the list that hybrid was made with, but two faults of all host policies were found on these rows"
_SIZE = "a device without host memory preempts and computes again; every system with its best token budget"


@dataclass(frozen=True)
class Setting:
    """A platform and the lengths of its requests."""

    platform: Platform
    lengths: str

    def cases(self, scale: Scale) -> list[HostCase]:
        """The closed batch, for every system with the first seed, not tuned yet."""
        case = HostCase(system=DEVICE, platform=self.platform, lengths=self.lengths, requests=self.requests(scale))
        return [replace(case, system=system, seed=scale.seeds[0]) for system in SYSTEMS]

    def requests(self, scale: Scale) -> int:
        """Several times what the device holds, fewer where answers are long."""
        _, output = mean_lengths(self.lengths)
        few = (240, 120) if self.platform == A10 else (80, 40)
        number = few[0] if output < 300 else round(few[0] - (few[0] - few[1]) * min(1.0, (output - 300) / 700))
        return number * scale.pick(1, _LONGER)


Backlogs = Mapping[tuple[Setting, str], Sequence[HostCase]]
"""By setting and label of the system: one case for each seed, with the system's best token budget."""


def figure_7_settings(scale: Scale) -> list[Setting]:
    """A10, mean input 1000."""
    return [Setting(A10, f"1000:{output}") for output in scale.pick(OUTPUTS, _ALL_OUTPUTS)]


def osc_settings(scale: Scale) -> list[Setting]:
    """T4, the lengths of OSC with outputs of another mean."""
    return [Setting(T4, f"osc:{output}") for output in scale.pick(OUTPUTS, _ALL_OUTPUTS)]


def backlogs(settings: Sequence[Setting], scale: Scale, run: Run) -> Backlogs:
    """Every system in every setting, tuned with the first seed, then run with all."""
    found = tuned([case for setting in settings for case in setting.cases(scale)], run)
    pairs = [(setting, system.label) for setting in settings for system in SYSTEMS]
    return {pair: over_seeds(case, scale.seeds) for pair, case in zip(pairs, found, strict=True)}


# ------------------------------------------------------------------------------------------------------ figures 5, 7


def throughput_figure(scale: Scale, run: Run) -> Finding:
    """Figure 5: (a) T4 with OSC's inputs and outputs of varied length, (b) A10 with three workloads."""
    settings = [*osc_settings(scale), *(Setting(A10, name) for name in _WORKLOADS)]
    cases = backlogs(settings, scale, run)
    outcomes = run(case for several in cases.values() for case in several)
    panels = (
        _over_outputs("(a) T4, LLaMA-2-7B, OSC", osc_settings(scale), cases, outcomes, _ABSOLUTE),
        _over_workloads(cases, outcomes),
    )
    chart = Chart(title="APEX, figure 5: throughput in a backlog", panels=panels, columns=1)
    claims = [*_t4_claims(osc_settings(scale), cases, outcomes), *_a10_claims(cases, outcomes)]
    return Finding(claims, chart, _rows(cases, outcomes), _COLUMNS)


def output_lengths(scale: Scale, run: Run) -> Finding:
    """Figure 7: A10, mean input 1000, outputs from 50 to 1000; throughput over the device-only one."""
    settings = figure_7_settings(scale)
    cases = backlogs(settings, scale, run)
    outcomes = run(case for several in cases.values() for case in several)
    panel = _over_outputs("A10, LLaMA-3.1-8B, mean input 1000", settings, cases, outcomes, _RELATIVE)
    chart = Chart(title="APEX, figure 7: throughput by output length", panels=(panel,))
    claims = [
        _claim(
            "7", f"outputs of {output}: APEX over NEO", paper, _at(output, APEX, NEO, settings, cases, outcomes), least
        )
        for output, paper, least in (
            (50, "1.05x", 1.02),
            (200, "1.05x", 1.02),
            (500, "1.31x", 1.15),
            (1000, "1.37x", 1.18),
        )
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

    (at_device, over_device), (at_neo, over_neo) = best(DEVICE.label), best(NEO.label)
    return [
        _claim("5a", f"APEX over the device alone, at most ({at_device.lengths})", "1.96x", over_device, 1.48, _SIZE),
        _claim("5a", f"APEX over NEO, at most ({at_neo.lengths})", "1.71x (abstract: 1.49x)", over_neo, 1.25),
    ]


def _a10_claims(cases: Backlogs, outcomes: Outcomes) -> list[Claim]:
    claims = []
    papers = {"livebench": (1.22, 1.06), "azure-conv": (1.11, 1.13), "dolphin-r1": (1.20, 1.16)}
    for name, (over_device, over_neo) in papers.items():
        setting = Setting(A10, name)
        for other, paper, assumption in ((DEVICE, over_device, _SIZE), (NEO, over_neo, _ORDER)):
            ours = ratio(cases[setting, APEX.label], cases[setting, other.label], outcomes)
            least = 1 + (paper - 1) / 2
            claims.append(_claim("5b", f"{name}: APEX over {other.label}", f"{paper:.2f}x", ours, least, assumption))
        ours = ratio(cases[setting, HYBRID.label], cases[setting, DEVICE.label], outcomes)
        claims.append(_claim("5b", f"{name}: hybrid over {DEVICE.label}", "ours", ours, 0.98, _NOT_IN_LIST))
    return claims


def _claim(figure: str, says: str, paper: str, ours: Spread, least: float, assumption: str = _ORDER) -> Claim:
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
    for system in SYSTEMS:
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


def _over_workloads(cases: Backlogs, outcomes: Outcomes) -> Panel:
    curves = []
    for system in SYSTEMS:
        spreads = [spread(cases[Setting(A10, name), system.label], outcomes, throughput) for name in _WORKLOADS]
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
