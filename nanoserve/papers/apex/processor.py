"""What the paper's order hangs on: how fast the CPUs attend. The same backlog with CPUs from slow to fast."""

from collections.abc import Sequence
from dataclasses import replace

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
    T4,
    ratio,
    throughput,
)
from nanoserve.papers.apex.throughput import backlogs, large_backlog
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.tuning import spread

_SHARES = (0.05, PAPERS_SHARE, 0.2, 0.6)
_SYSTEMS = (NEO, OVERLAP, APEX, APEX_8, HYBRID)
_PLACES = ((A10, "1000:300"), (T4, "osc:200"))
_DEVICE_GAINS = {A10.name: "1.11x to 1.89x", T4.name: "1.84x to 1.96x"}
_BOUND = "how many sequences the host has, and Tgatt / Tlin: see figure bounds for what there is to gain"


def processors(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: throughput by the share of the CPUs' data sheet that attention reaches."""
    settings = [
        replace(large_backlog(platform, lengths, scale), processor=share, systems=(DEVICE, *_SYSTEMS))
        for platform, lengths in _PLACES
        for share in _SHARES
    ]
    cases = backlogs(settings, scale.first_seed, run)
    outcomes = run(case for several in cases.values() for case in several)
    rows = [
        {
            "platform": setting.platform.name,
            "system": label,
            "share": setting.processor,
            "budget": several[0].system.token_budget,
            "throughput": spread(several, outcomes, throughput).mean,
            "over_device": ratio(several, cases[setting, DEVICE.label], outcomes).mean,
            "over_neo": ratio(several, cases[setting, NEO.label], outcomes).mean,
            "processor": 100 * outcomes[several[0]].result.processor_share,
        }
        for (setting, label), several in cases.items()
    ]
    return Finding(_claims(rows), _chart(rows), rows, _COLUMNS)


_COLUMNS = (
    Column("platform", "platform"),
    Column("system", "system", justify="left"),
    Column("CPU share", "share", ".2f"),
    Column("budget", "budget", ",d"),
    Column("tok/s", "throughput", ",.0f"),
    Column("over device only", "over_device", ".2f"),
    Column("over NEO", "over_neo", ".2f"),
    Column("CPU busy, %", "processor", ".0f"),
)


def _claims(rows: Sequence[dict[str, object]]) -> list[Claim]:
    """Where the CPUs are a tenth as fast as the device; and beside NEO with its own kernel, half as fast."""
    speeds = {(row["platform"], row["system"], row["share"]): float(str(row["throughput"])) for row in rows}
    claims = []
    for platform, paper in ((A10, "1.05x to 1.37x"), (T4, "up to 1.71x")):
        for system, other, least in (
            (OVERLAP, NEO, 1.1),
            (APEX, NEO, 1.1),
            (HYBRID, NEO, 1.1),
            (APEX, NEO_KERNEL, 1.1),
            (OVERLAP, DEVICE, 1.2),
            (HYBRID, DEVICE, 1.2),
        ):
            below = (NEO.label, PAPERS_SHARE / 2) if other is NEO_KERNEL else (other.label, PAPERS_SHARE)
            claims.append(
                Claim(
                    figure="cpu",
                    says=f"{platform.name}, CPUs a tenth as fast as the device: {system.label} over {other.label}",
                    paper=_DEVICE_GAINS[platform.name] if other is DEVICE else paper,
                    ours=Spread.of([speeds[platform.name, system.label, PAPERS_SHARE] / speeds[platform.name, *below]]),
                    form="{:.2f}x",
                    at_least=least,
                    assumption=_BOUND,
                )
            )
    return claims


def _chart(rows: Sequence[dict[str, object]]) -> Chart:
    panels = []
    for platform, lengths in _PLACES:
        here = [row for row in rows if row["platform"] == platform.name]
        curves = tuple(
            Curve(
                label=system.label,
                xs=tuple(100 * share for share in _SHARES),
                ys=tuple(float(str(row["over_device"])) for row in here if row["system"] == system.label),
            )
            for system in _SYSTEMS
        )
        panels.append(
            Panel(
                title=f"{platform.name}, {platform.model}, {lengths}",
                x="share of the CPUs' data sheet, %",
                y="throughput over the device alone",
                curves=curves,
                log_x=True,
                log_y=True,
                marks=(1.0,),
            )
        )
    return Chart(title="How fast the CPUs attend", panels=tuple(panels), columns=2)
