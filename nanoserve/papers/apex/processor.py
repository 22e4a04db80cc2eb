"""What the paper's order hangs on: how fast the CPUs attend. The same backlog with CPUs from slow to fast."""

from collections.abc import Sequence

from msgspec.structs import replace

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.apex.settings import (
    A10,
    APEX,
    APEX_8,
    DEVICE,
    HYBRID,
    NEO,
    OVERLAP,
    HostCase,
    ratio,
    throughput,
    tuned,
)
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.tuning import spread

_SHARES = (0.05, 0.12, 0.6)
_ALL_SHARES = (0.03, 0.06, 0.12, 0.25, 0.6)
_PAPERS_SHARE = 0.12
"""At which an A10's attention is ten times as fast as the CPUs': "typically less than 10 %" (section 2.4)."""
_SYSTEMS = (NEO, OVERLAP, APEX, APEX_8, HYBRID)
_LENGTHS = "1000:300"


def processors(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: throughput by the share of the CPUs' data sheet that attention reaches."""
    shares = scale.pick(_SHARES, _ALL_SHARES)
    base = HostCase(system=DEVICE, platform=A10, lengths=_LENGTHS, requests=scale.pick(200, 400), seed=scale.seeds[0])
    wanted = [base, *(replace(base, system=system, processor=share) for system in _SYSTEMS for share in shares)]
    device, *found = tuned(wanted, run)
    outcomes = run([device, *found])
    of = {(case.system.label, case.processor): case for case in found}

    def over(above: HostCase, below: HostCase) -> float:
        return ratio([above], [below], outcomes).mean

    claims = [
        Claim(
            figure="cpu",
            says=f"CPUs at 10 % of the device's attention: {above.label} over {below.label}",
            paper=paper,
            ours=ratio([of[above.label, _PAPERS_SHARE]], [other], outcomes),
            form="{:.2f}x",
            at_least=least,
            at_most=most,
            assumption=why,
        )
        for above, below, other, paper, least, most, why in (
            (
                NEO,
                DEVICE,
                device,
                "seldom a gain",
                None,
                1.05,
                "host sequences pay for a second pass only with prompts",
            ),
            (OVERLAP, NEO, of[NEO.label, _PAPERS_SHARE], "1.05x to 1.37x", 1.02, None, "many host sequences"),
            (APEX, NEO, of[NEO.label, _PAPERS_SHARE], "1.05x to 1.37x", 1.02, None, "many host sequences"),
            (APEX_8, NEO, of[NEO.label, _PAPERS_SHARE], "1.05x to 1.37x", 1.02, None, "eight times as many, or none"),
        )
    ]
    rows = [
        {
            "system": system.label,
            "share": share,
            "budget": of[system.label, share].system.token_budget,
            "throughput": spread([of[system.label, share]], outcomes, throughput).mean,
            "over_device": over(of[system.label, share], device),
        }
        for system in _SYSTEMS
        for share in shares
    ]
    columns = (
        Column("system", "system"),
        Column("CPU share", "share", ".2f"),
        Column("budget", "budget", ",d"),
        Column("tok/s", "throughput", ",.0f"),
        Column("over device only", "over_device", ".2f"),
    )
    return Finding(claims, _chart(shares, rows), rows, columns)


def _chart(shares: Sequence[float], rows: Sequence[dict[str, object]]) -> Chart:
    curves = tuple(
        Curve(
            label=system.label,
            xs=tuple(100 * share for share in shares),
            ys=tuple(float(str(row["over_device"])) for row in rows if row["system"] == system.label),
        )
        for system in _SYSTEMS
    )
    panel = Panel(
        title="A10, LLaMA-3.1-8B, 1000 in, 300 out",
        x="share of the CPUs' data sheet, %",
        y="throughput over the device alone",
        curves=curves,
        log_x=True,
        marks=(1.0,),
    )
    return Chart(title="How fast the CPUs attend", panels=(panel,))
