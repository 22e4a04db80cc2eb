"""Seesaw's figures 10 and 11: end-to-end throughput against the best static configuration, with PCIe and NVLink."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.search import Comparison, compare
from nanoserve.papers.seesaw.settings import Setting

MODELS = (("llama-3-15b", 4), ("codellama-34b", 8), ("llama-2-70b", 8))
"""And the devices of each (section 6.2)."""
WORKLOADS = (("arxiv", 250, 500), ("sharegpt-gllm", 1000, 2000))
"""Lengths, and requests at the reduced and at the paper's size (section 6.1)."""
A10, L4 = "seesaw-a10", "seesaw-l4"
PCIE, NVLINK = "seesaw-a100-pcie", "seesaw-a100-nvlink"

_ASSUMPTION = "all-reduces at 75 % of PCIe 4.0 x8; a few long answers end each batch in both systems"
_L4_ASSUMPTION = "both reach 70 % of their data sheets; it would take an L4 that reaches less of its 121 TFLOPS"

COLUMNS = (
    Column("model", "model"),
    Column("machine", "machine", justify="left"),
    Column("lengths", "lengths", justify="left"),
    Column("best static (tokens of a step)", "static", justify="left"),
    Column("req/s", "static_requests_per_second", ".2f"),
    Column("best pair", "seesaw", justify="left"),
    Column("req/s", "seesaw_requests_per_second", ".2f"),
    Column("transitions", "transitions", "d"),
    Column("gain", "gain_text"),
)


def _settings(scale: Scale, machines: Iterable[str], models: Sequence[tuple[str, int]] = MODELS) -> list[Setting]:
    """Every model with every workload on every machine."""
    return [
        Setting(
            model=model,
            machine=machine,
            devices=devices,
            lengths=lengths,
            requests=scale.pick(reduced, full),
            seed=scale.seeds[0],
        )
        for machine in machines
        for lengths, reduced, full in WORKLOADS
        for model, devices in models
    ]


def _geometric_means(found: Iterable[Comparison]) -> list[float]:
    """Over settings, of each seed."""
    return [geometric_mean(gains) for gains in zip(*(one.gains for one in found), strict=True)]


def _extremes(found: Sequence[Comparison], which: Any) -> Spread:
    """The smallest or the largest gain over settings, of each seed."""
    return Spread.of(map(which, zip(*(one.gains for one in found), strict=True)))


# ---- figure 10 --------------------------------------------------------------------------------------------------


def on_a10_and_l4(scale: Scale, run: Run) -> Finding:
    """Figure 10: the twelve settings."""
    found = compare(_settings(scale, (A10, L4)), scale, run)
    by_machine = {name: [one for one in found if one.setting.machine == name] for name in (A10, L4)}
    claims = [
        _gain_claim(
            "never below the best static configuration: the smallest gain", "1.06x", _extremes(found, min), 0.98
        ),
        _gain_claim(
            "gain over the best static, twelve settings", "1.36x", Spread.of(_geometric_means(found)), 1.2, 1.55
        ),
        _gain_claim("gain on A10, six settings", "1.45x", Spread.of(_geometric_means(by_machine[A10])), 1.2, 1.7),
        _gain_claim("gain on L4, six settings", "1.29x", Spread.of(_geometric_means(by_machine[L4])), 1.1, 1.5),
        _gain_claim("gain on A10 over gain on L4", "1.12x", _more_on_a10(by_machine), 1.0, assumption=_L4_ASSUMPTION),
        _gain_claim("largest gain on A10", "1.78x", _extremes(by_machine[A10], max), 1.4, 2.1),
        _gain_claim("largest gain on L4", "1.52x", _extremes(by_machine[L4], max), 1.3, 1.8),
    ]
    panels = tuple(
        _bars(f"{name}, {lengths}", [one for one in by_machine[name] if one.setting.lengths == lengths])
        for name in (A10, L4)
        for lengths, _, _ in WORKLOADS
    )
    chart = Chart(title="Seesaw, figure 10: throughput over the best static configuration", panels=panels, columns=2)
    return Finding(claims, chart, [one.row() for one in found], COLUMNS)


def _more_on_a10(by_machine: Mapping[str, Sequence[Comparison]]) -> Spread:
    pairs = zip(*(_geometric_means(by_machine[name]) for name in (A10, L4)), strict=True)
    return Spread.of(above / below for above, below in pairs)


def _gain_claim(
    says: str, paper: str, ours: Spread, at_least: float, at_most: float | None = None, *, assumption: str = _ASSUMPTION
) -> Claim:
    return Claim(
        figure="10",
        says=says,
        paper=paper,
        ours=ours,
        form="{:.2f}x",
        at_least=at_least,
        at_most=at_most,
        assumption=assumption,
    )


def _bars(title: str, found: Sequence[Comparison]) -> Panel:
    """Normalized to the static configuration, as in the paper; the configurations stand below."""
    names = tuple(
        f"{one.setting.model.rpartition('-')[2]}\n{one.static.label}\n{one.resharding.label}" for one in found
    )
    gains = [one.gain for one in found]
    return Panel(
        title=title,
        x="",
        y="normalized throughput",
        kind="bar",
        curves=(
            Curve(label="best static", xs=names, ys=(1.0,) * len(found)),
            Curve(
                label="seesaw",
                xs=names,
                ys=tuple(gain.mean for gain in gains),
                lows=tuple(gain.low for gain in gains),
                highs=tuple(gain.high for gain in gains),
            ),
        ),
    )


# ---- figure 11 --------------------------------------------------------------------------------------------------

_PAPERS_GAINS = {
    (PCIE, "arxiv"): ("+46 %", 1.2, 1.7),
    (PCIE, "sharegpt-gllm"): ("+30 %", 1.1, 1.5),
    (NVLINK, "arxiv"): ("1.00x", 0.98, 1.15),
    (NVLINK, "sharegpt-gllm"): ("+13 %", 1.0, 1.3),
}
"""By machine and workload: the paper's number, and what ours is to lie between."""


def on_a100(scale: Scale, run: Run) -> Finding:
    """Figure 11: the same model with slow and with fast links."""
    found = compare(_settings(scale, (PCIE, NVLINK), MODELS[2:]), scale, run)
    places = {(one.setting.machine, one.setting.lengths): one for one in found}
    claims = []
    for place, (paper, low, high) in _PAPERS_GAINS.items():
        claims.append(
            Claim(
                figure="11",
                says=f"gain over the best static, 70B, {place[0]}, {place[1]}",
                paper=paper,
                ours=places[place].gain,
                form="{:.2f}x",
                at_least=low,
                at_most=high,
                assumption="NVLink as microsoft/vidur measured it" if place[0] == NVLINK else "PCIe 4.0 x8 at 75 %",
            )
        )
    for lengths, static, seesaw in (("arxiv", "61 %", "89 %"), ("sharegpt-gllm", "62 %", "82 %")):
        slow, fast = places[PCIE, lengths], places[NVLINK, lengths]
        for who, paper, above in (
            ("the best static", static, slow.static_outcomes),
            ("Seesaw", seesaw, slow.resharding_outcomes),
        ):
            ratios = [100 * below.seconds / one.seconds for below, one in zip(fast.static_outcomes, above, strict=True)]
            claims.append(
                Claim(
                    figure="11",
                    says=f"{who} on PCIe over the best static on NVLink, {lengths}",
                    paper=paper,
                    ours=Spread.of(ratios),
                    form="{:.0f} %",
                    at_least=30 if who != "Seesaw" else 50,
                    at_most=90 if who != "Seesaw" else 110,
                    assumption="the links of the two machines",
                )
            )
    return Finding(claims, _chart_11(places), [one.row() for one in found], COLUMNS)


def _chart_11(places: dict[tuple[str, str], Comparison]) -> Chart:
    """Normalized to the static configuration on NVLink."""
    names = tuple(lengths for lengths, _, _ in WORKLOADS)
    best = [sum(one.seconds for one in places[NVLINK, name].static_outcomes) for name in names]
    curves = []
    for machine, link in ((PCIE, "pcie"), (NVLINK, "nvlink")):
        for who in ("static", "resharding"):
            taken = [sum(one.seconds for one in getattr(places[machine, name], f"{who}_outcomes")) for name in names]
            label = f"{'seesaw' if who == 'resharding' else 'best static'} + {link}"
            heights = tuple(fast / mine for fast, mine in zip(best, taken, strict=True))
            curves.append(Curve(label=label, xs=names, ys=heights))
    panel = Panel(title="8 x A100", x="", y="throughput (normalized)", kind="bar", curves=tuple(curves))
    return Chart(title="Seesaw, figure 11: LLaMA2-70B on A100", panels=(panel,))
