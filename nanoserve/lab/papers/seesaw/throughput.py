"""Seesaw's figures 10 and 11: end-to-end throughput against the best static configuration, with
PCIe and NVLink."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from statistics import geometric_mean

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, Panel, panel
from nanoserve.lab.papers.cases import Case
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.seesaw.search import (
    RESHARDING_KIND,
    STATIC_KIND,
    BestOfBoth,
    compare,
    gains,
    seconds,
)
from nanoserve.lab.papers.seesaw.settings import A10, L4, NVLINK, PCIE, closed_batch
from nanoserve.record.metrics import Spread

# models and the devices of each (section 6.2)
MODELS = (("llama-3-15b", 4), ("codellama-34b", 8), ("llama-2-70b", 8))
WORKLOADS = (("arxiv", 250, 500), ("sharegpt-gllm", 1000, 2000))
"""Lengths, and requests at the reduced and at the paper's size (section 6.1)."""
GAIN_COLUMNS = columns(
    ("", "model"),
    ("<", "machine", "lengths", ("best static (tokens of a step)", "static")),
    (".2f", ("req/s", "static_requests_per_second")),
    ("<", ("best pair", "seesaw")),
    (".2f", ("req/s", "seesaw_requests_per_second")),
    ("d", "transitions"),
    ("", ("gain", "gain_text")),
)


def _settings(
    scale: Scale, machines: Iterable[str], models: Sequence[tuple[str, int]] = MODELS
) -> list[Case]:
    """Every model with every workload on every machine."""
    return [
        closed_batch(
            model, machine, devices, lengths, scale.pick(reduced, full), seed=scale.seeds[0]
        )
        for machine in machines
        for lengths, reduced, full in WORKLOADS
        for model, devices in models
    ]


def _row(found: BestOfBoth, setting: Case) -> dict[str, object]:
    """The comparison in one setting as a row of a table."""
    row: dict[str, object] = {
        "model": setting.model,
        "machine": setting.machine,
        "lengths": setting.lengths,
    }
    for name, kind in (("static", STATIC_KIND), ("seesaw", RESHARDING_KIND)):
        best = found.cases[setting, kind][0]
        row[name] = f"{best.layout_name} ({best.system.token_budget})"
        row[f"{name}_requests_per_second"] = found.mean(
            (setting, kind), attrgetter("result.requests_per_second")
        )
    gain = Spread.of(gains(found, setting))
    row["transitions"] = max(
        one.result.transitions for one in found.outcomes((setting, RESHARDING_KIND))
    )
    return row | {"gain": gain.mean, "gain_text": gain.text("{:.2f}x")}


def _settings_of(found: BestOfBoth) -> list[Case]:
    return list(dict.fromkeys(setting for setting, _ in found.cases))


def on_a10_and_l4(scale: Scale, run: Run) -> Finding:
    """Figure 10: the twelve settings."""
    found = compare(_settings(scale, (A10, L4)), scale, run)
    every = _settings_of(found)
    places = {name: [one for one in every if one.machine == name] for name in (A10, L4)}

    def over_settings(
        settings: Sequence[Case], which: Callable[[Iterable[float]], float]
    ) -> list[float]:
        """For each seed one number of the gains in all settings: the smallest, the largest or their
        mean."""
        of_settings = [gains(found, one) for one in settings]
        return [which(several) for several in zip(*of_settings, strict=True)]

    on_a10, on_l4 = (over_settings(settings, geometric_mean) for settings in places.values())
    ours = {
        "10 smallest": Spread.of(over_settings(every, min)),
        "10 all": Spread.of(over_settings(every, geometric_mean)),
        "10 A10": Spread.of(on_a10),
        "10 L4": Spread.of(on_l4),
        "10 A10 over L4": Spread.of(
            above / below for above, below in zip(on_a10, on_l4, strict=True)
        ),
        "10 largest A10": Spread.of(over_settings(places[A10], max)),
        "10 largest L4": Spread.of(over_settings(places[L4], max)),
    }
    panels = [
        _bars(f"{name}, {lengths}", found, [one for one in settings if one.lengths == lengths])
        for name, settings in places.items()
        for lengths, _, _ in WORKLOADS
    ]
    chart = Chart(
        "Seesaw, figure 10: throughput over the best static configuration", panels, columns=2
    )
    return Finding(claims("seesaw", ours), chart, [_row(found, one) for one in every])


def _bars(title: str, found: BestOfBoth, settings: Sequence[Case]) -> Panel:
    """Normalized to the static configuration, as in the paper; the configurations stand below."""
    names = []
    for one in settings:
        static, pair = (
            found.cases[one, kind][0].layout_name for kind in (STATIC_KIND, RESHARDING_KIND)
        )
        names.append(f"{one.model.rpartition('-')[2]}\n{static}\n{pair}")
    heights: dict[str, Sequence[float] | Sequence[Spread]] = {
        "best static": [1.0] * len(settings),
        "seesaw": [Spread.of(gains(found, one)) for one in settings],
    }
    return panel(title, "", "normalized throughput", names, heights, kind="bar")


def on_a100(scale: Scale, run: Run) -> Finding:
    """Figure 11: the same model with slow and with fast links."""
    found = compare(_settings(scale, (PCIE, NVLINK), MODELS[2:]), scale, run)
    places = {(one.machine, one.lengths): one for one in _settings_of(found)}

    ours = {
        f"11 gain {machine} {lengths}": Spread.of(gains(found, one))
        for (machine, lengths), one in places.items()
    }
    names = [lengths for lengths, _, _ in WORKLOADS]
    best = {name: (places[NVLINK, name], STATIC_KIND) for name in names}
    for name in names:
        for kind in (STATIC_KIND, RESHARDING_KIND):
            over_best = found.ratios(best[name], (places[PCIE, name], kind), seconds)
            ours[f"11 PCIe {name} {kind}"] = Spread.of(100 * ratio for ratio in over_best)
    heights = {
        f"{label} + {link}": [
            sum(found.values(best[name], seconds))
            / sum(found.values((places[machine, name], kind), seconds))
            for name in names
        ]
        for machine, link in ((PCIE, "pcie"), (NVLINK, "nvlink"))
        for kind, label in ((STATIC_KIND, "best static"), (RESHARDING_KIND, "seesaw"))
    }
    bars = panel("8 x A100", "", "throughput (normalized)", names, heights, kind="bar")
    chart = Chart("Seesaw, figure 11: LLaMA2-70B on A100", [bars])
    return Finding(claims("seesaw", ours), chart, [_row(found, one) for one in places.values()])
