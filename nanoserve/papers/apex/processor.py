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
from nanoserve.papers.apex.throughput import large_backlog, large_backlogs
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.tuning import spread

_SHARES = (0.05, PAPERS_SHARE, 0.2, 0.6)
_TASK_POOL = OVERLAP.with_("overlap, 4 cohorts", cohorts=4)
_SYSTEMS = (NEO, NEO_KERNEL, OVERLAP, _TASK_POOL, APEX, APEX_8, HYBRID)
_PLACES = ((A10, "1000:300"), (T4, "osc:200"))
_GAIN = "1.05x to 1.37x (A10), up to 1.71x (T4)"
_BOUND = "closed forms, all CPUs busy: figure bounds"


def processors(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: throughput by the share of the CPUs' data sheet that attention reaches."""
    settings = [
        replace(large_backlog(platform, lengths, scale), processor=share, systems=(DEVICE, *_SYSTEMS))
        for platform, lengths in _PLACES
        for share in _SHARES
    ]
    cases = large_backlogs(settings, scale, run)
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
    """Overlap and hybrid where the CPUs are a tenth as fast as the device, on both platforms."""
    claims = []
    for platform, _ in _PLACES:
        slow = {row["system"]: row for row in rows if (row["platform"], row["share"]) == (platform.name, PAPERS_SHARE)}
        for system, other, figure, least in (
            (OVERLAP, NEO, "over_neo", 1.1),
            (OVERLAP, DEVICE, "over_device", 1.2),
            (APEX, NEO, "over_neo", 1.1),
            (HYBRID, NEO, "over_neo", 1.1),
            (HYBRID, DEVICE, "over_device", 1.2),
        ):
            claims.append(
                Claim(
                    figure="cpu",
                    says=f"{platform.name}, CPUs a tenth as fast as the device: {system.label} over {other.label}",
                    paper=_GAIN if other is NEO else "1.11x to 1.96x",
                    ours=Spread.of([float(str(slow[system.label][figure]))]),
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
