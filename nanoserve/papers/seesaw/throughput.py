"""Seesaw's figures 10 and 11: end-to-end throughput against the best static configuration, with PCIe and NVLink."""

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.charts import Chart, Panel, panel
from nanoserve.papers.claims import ClaimRow, Spread, claims
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.search import BestOfBoth, compare
from nanoserve.papers.seesaw.settings import OfflineBatch

MODELS = (("llama-3-15b", 4), ("codellama-34b", 8), ("llama-2-70b", 8))
"""Models and the devices of each (section 6.2)."""
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


def _settings(scale: Scale, machines: Iterable[str], models: Sequence[tuple[str, int]] = MODELS) -> list[OfflineBatch]:
    """Every model with every workload on every machine."""
    return [
        OfflineBatch(
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


def _over_settings(found: Iterable[BestOfBoth], which: Callable[[Iterable[float]], float]) -> list[float]:
    """For each seed one number of the gains in all settings: the smallest, the largest or their mean."""
    return [which(gains) for gains in zip(*(one.gains for one in found), strict=True)]


# ---- figure 10 --------------------------------------------------------------------------------------------------


def on_a10_and_l4(scale: Scale, run: Run) -> Finding:
    """Figure 10: the twelve settings."""
    found = compare(_settings(scale, (A10, L4)), scale, run)
    a10, l4 = ([one for one in found if one.setting.machine == name] for name in (A10, L4))
    means = {name: _over_settings(some, geometric_mean) for name, some in ((A10, a10), (L4, l4), ("", found))}
    smallest = Spread.of(_over_settings(found, min))
    more_on_a10 = Spread.of(above / below for above, below in zip(means[A10], means[L4], strict=True))
    both, why = Spread.of(means[""]), _ASSUMPTION
    rows: list[ClaimRow] = [
        ("never below the best static configuration: the smallest gain", "1.06x", smallest, "at least 0.98x", why),
        ("gain over the best static, twelve settings", "1.36x", both, "1.20x to 1.55x", why),
        ("gain on A10, six settings", "1.45x", Spread.of(means[A10]), "1.20x to 1.70x", why),
        ("gain on L4, six settings", "1.29x", Spread.of(means[L4]), "1.10x to 1.50x", why),
        ("gain on A10 over gain on L4", "1.12x", more_on_a10, "at least 1.00x", _L4_ASSUMPTION),
        ("largest gain on A10", "1.78x", Spread.of(_over_settings(a10, max)), "1.40x to 2.10x", why),
        ("largest gain on L4", "1.52x", Spread.of(_over_settings(l4, max)), "1.30x to 1.80x", why),
    ]
    panels = [
        _bars(f"{name}, {lengths}", [one for one in some if one.setting.lengths == lengths])
        for name, some in ((A10, a10), (L4, l4))
        for lengths, _, _ in WORKLOADS
    ]
    chart = Chart("Seesaw, figure 10: throughput over the best static configuration", panels, columns=2)
    return Finding(claims("10", rows), chart, [one.row() for one in found], COLUMNS)


def _bars(title: str, found: Sequence[BestOfBoth]) -> Panel:
    """Normalized to the static configuration, as in the paper; the configurations stand below."""
    names = [f"{one.setting.model.rpartition('-')[2]}\n{one.static.label}\n{one.resharding.label}" for one in found]
    heights: dict[str, Sequence[float] | Sequence[Spread]] = {
        "best static": [1.0] * len(found),
        "seesaw": [one.gain for one in found],
    }
    return panel(title, "", "normalized throughput", names, heights, kind="bar")


# ---- figure 11 --------------------------------------------------------------------------------------------------

_PAPERS_GAINS = {
    (PCIE, "arxiv"): ("+46 %", "1.20x to 1.70x"),
    (PCIE, "sharegpt-gllm"): ("+30 %", "1.10x to 1.50x"),
    (NVLINK, "arxiv"): ("1.00x", "0.98x to 1.15x"),
    (NVLINK, "sharegpt-gllm"): ("+13 %", "1.00x to 1.30x"),
}
"""By machine and workload: the paper's number, and what is asked."""
_ON_PCIE = [
    ("arxiv", "static", "the best static", "61 %", "30 % to 90 %"),
    ("arxiv", "resharding", "Seesaw", "89 %", "50 % to 110 %"),
    ("sharegpt-gllm", "static", "the best static", "62 %", "30 % to 90 %"),
    ("sharegpt-gllm", "resharding", "Seesaw", "82 %", "50 % to 110 %"),
]
"""Workload, kind of configuration and its name, the paper's share of the best static on NVLink, and what is asked."""


def on_a100(scale: Scale, run: Run) -> Finding:
    """Figure 11: the same model with slow and with fast links."""
    found = compare(_settings(scale, (PCIE, NVLINK), MODELS[2:]), scale, run)
    places = {(one.setting.machine, one.setting.lengths): one for one in found}

    def over_best(machine: str, lengths: str, kind: str) -> list[float]:
        """Throughput over that of the best static configuration on NVLink, seed by seed."""
        pairs = zip(places[NVLINK, lengths].seconds("static"), places[machine, lengths].seconds(kind), strict=True)
        return [best / mine for best, mine in pairs]

    rows: list[ClaimRow] = [
        (
            f"gain over the best static, 70B, {machine}, {lengths}",
            paper,
            places[machine, lengths].gain,
            asked,
            "NVLink as microsoft/vidur measured it" if machine == NVLINK else "PCIe 4.0 x8 at 75 %",
        )
        for (machine, lengths), (paper, asked) in _PAPERS_GAINS.items()
    ]
    rows += [
        (
            f"{who} on PCIe over the best static on NVLink, {lengths}",
            paper,
            Spread.of(100 * ratio for ratio in over_best(PCIE, lengths, kind)),
            asked,
            "the links of the two machines",
        )
        for lengths, kind, who, paper, asked in _ON_PCIE
    ]
    names = [lengths for lengths, _, _ in WORKLOADS]
    best = [sum(places[NVLINK, name].seconds("static")) for name in names]
    heights = {
        f"{label} + {link}": [
            fast / sum(places[machine, name].seconds(kind)) for fast, name in zip(best, names, strict=True)
        ]
        for machine, link in ((PCIE, "pcie"), (NVLINK, "nvlink"))
        for kind, label in (("static", "best static"), ("resharding", "seesaw"))
    }
    bars = panel("8 x A100", "", "throughput (normalized)", names, heights, kind="bar")
    chart = Chart("Seesaw, figure 11: LLaMA2-70B on A100", [bars])
    return Finding(claims("11", rows), chart, [one.row() for one in found], COLUMNS)
