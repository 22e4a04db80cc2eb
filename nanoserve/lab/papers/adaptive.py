"""Ours, after gLLM: AdaptiveThrottling over TokenThrottling, on a list fixed beforehand and
reported whole.

Loads are relative to what TokenThrottling serves at most in the same setting, so a first round of
simulations finds that out. Figure "list" is the comparison; figure "parts" switches the two ideas
of the policy off, one at a time, where memory is short.
"""

import operator
from collections.abc import Iterable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.papers.cases import (
    Metric,
    Outcome,
    Runs,
    System,
    mean_of,
    over_seeds,
    throughput,
)
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Paper, PaperFigure, Run, Scale
from nanoserve.lab.papers.gllm.systems import on_devices
from nanoserve.record.metrics import Spread

THROTTLING = System(label="throttling", policy="throttling")
ADAPTIVE = System(label="adaptive", policy="adaptive")
VARIANTS = (
    ADAPTIVE,
    ADAPTIVE.with_("adaptive, steps not filled up", fill=0),
    ADAPTIVE.with_("adaptive, nothing reserved", most_reserved=0.0),
    ADAPTIVE.with_("adaptive, half may be reserved", most_reserved=0.5),
)


class ListEntry(NamedTuple):
    """One line of the list."""

    model: str
    machine: str
    devices: int
    lengths: str
    """The model, the hardware that serves it, and the lengths of its requests."""
    pool: float  # share of the KV blocks
    load: float  # arrivals over what throttling serves at most


SETTINGS = [
    ListEntry(model, machine, devices, lengths, pool, load)
    for model, machine, devices in (
        ("qwen2.5-14b", "gllm-l20", 2),
        ("qwen2.5-32b", "gllm-l20", 4),
        ("llama-3.1-100b", "gllm-a800", 4),
    )
    for lengths in ("sharegpt-gllm", "azure-conv")
    for pool in (1.0, 0.125)
    for load in (0.5, 0.9, 1.2)
]
"""3 models x 2 workloads x 2 pools x 3 loads."""

SHORT_OF_MEMORY = [
    ListEntry("qwen2.5-32b", "gllm-l20", 4, "azure-conv", 0.125, 1.2),
    ListEntry("qwen2.5-32b", "gllm-l20", 4, "azure-conv", 0.0625, 1.2),
    # The answers are long beside the pool, and equal.
    ListEntry("qwen2.5-32b", "gllm-l20", 4, "256+1024", 0.0625, 1.2),
]

_REQUESTS, _REQUESTS_OF_FULL = 500, 2000
_SEED_OF_CAPACITY = 1000
"""Seed of the requests that find the most that throttling serves: other requests than the compared
ones."""


_TPOT, _TTFT, _PREEMPTIONS = (
    mean_of("tpot_ms"),
    mean_of("ttft_ms"),
    operator.attrgetter("result.preemptions"),
)


Place = tuple[ListEntry, str]  # an entry of the list, and the label of a system


class Comparisons(Runs[Place]):
    """Systems over throttling in every entry of a list; the jobs of throttling are among them."""

    @property
    def places(self) -> list[Place]:
        """All entries and labels except those of throttling."""
        return [place for place in self.cases if place[1] != THROTTLING.label]

    def over_throttling(self, place: Place, metric: Metric) -> Spread:
        """A metric over that of throttling."""
        return self.ratio(place, (place[0], THROTTLING.label), metric)

    def row(self, place: Place) -> dict[str, object]:
        """Metrics over throttling's, and preemptions, with the spread over seeds."""
        entry, label = place
        base = entry, THROTTLING.label
        row: dict[str, object] = {**entry._asdict(), "policy": label}
        metrics = {"throughput": throughput, "tpot": _TPOT, "ttft": _TTFT}
        spreads = {name: self.over_throttling(place, metric) for name, metric in metrics.items()}
        row |= spreads | {f"{name}_text": found.text("{:.3f}") for name, found in spreads.items()}
        for name, key in (("preemptions", place), ("throttling_preemptions", base)):
            found = self.spread(key, _PREEMPTIONS)
            row |= {name: found, f"{name}_text": found.text("{:.0f}")}
        row["throttling_tokens_per_second"] = self.spread(base, throughput)
        row["throttling_tpot_ms"] = self.spread(base, _TPOT)
        return row

    def ratios_by_seed(
        self, places: Sequence[Place], metric: Metric
    ) -> Iterable[tuple[float, ...]]:
        """For each seed, the ratio to throttling in each of these places."""
        ratios = [
            self.ratios((entry, label), (entry, THROTTLING.label), metric)
            for entry, label in places
        ]
        return zip(*ratios, strict=True)

    def mean_ratio(self, places: Sequence[Place], metric: Metric) -> Spread:
        """The geometric mean of each seed's ratios."""
        return Spread.of(map(geometric_mean, self.ratios_by_seed(places, metric)))


_COLUMNS = columns(
    ("", "lengths"),
    (".3g", "pool"),
    (".1f", "load"),
    (
        "",
        ("throughput", "throughput_text"),
        ("TPOT", "tpot_text"),
        ("TTFT", "ttft_text"),
        ("preempted", "preemptions_text"),
        ("throttling's", "throttling_preemptions_text"),
    ),
)


def compare(
    entries: Iterable[ListEntry], systems: Sequence[System], requests: int, scale: Scale, run: Run
) -> Comparisons:
    """Every system over throttling in every entry: one round for the loads, one for the
    comparisons."""
    at_once = {}
    for entry in entries:
        served = entry._asdict()
        del served["load"]
        at_once[entry] = on_devices(THROTTLING, **served, requests=requests, seed=_SEED_OF_CAPACITY)
    outcomes = run(at_once.values())
    jobs = {}
    for entry, case in at_once.items():
        rate = entry.load * _requests_per_second(outcomes[case])
        for system in [THROTTLING] + list(systems):
            jobs[entry, system.label] = over_seeds(
                replace(case, rate=rate, system=system), scale.seeds
            )
    return Comparisons(run, jobs)


def _requests_per_second(outcome: Outcome) -> float:
    """Requests of average length per second, in the steady state."""
    result = outcome.result
    return (
        outcome.steady.tokens_per_second
        * result.requests
        / (result.input_tokens + result.output_tokens)
    )


def _list(scale: Scale, run: Run) -> Finding:
    """The list in a few numbers. No paper claims them: in its column stands what adaptive is meant
    for."""
    found = compare(SETTINGS, [ADAPTIVE], scale.pick(_REQUESTS, _REQUESTS_OF_FULL), scale, run)
    every = found.places
    short = [one for one in every if one[0].pool < 1 and one[0].load > 1]

    def preemptions(system: System) -> list[float]:
        """Add up all entries, for each seed."""
        counts = [found.values((entry, system.label), _PREEMPTIONS) for entry, _ in every]
        return [sum(of_seed) for of_seed in zip(*counts, strict=True)]

    ours = {
        "list throughput": found.mean_ratio(every, throughput),
        "list worst throughput": Spread.of(map(min, found.ratios_by_seed(every, throughput))),
        "list TPOT": found.mean_ratio(every, _TPOT),
        "list worst TPOT": Spread.of(map(max, found.ratios_by_seed(every, _TPOT))),
        "list preemptions": Spread.of(
            map(operator.sub, preemptions(ADAPTIVE), preemptions(THROTTLING))
        ),
        "list short of memory": found.mean_ratio(short, throughput),
        "list TTFT": found.mean_ratio(every, _TTFT),
    }
    return Finding(claims("adaptive", ours), None, [*map(found.row, every)])


def _parts(scale: Scale, run: Run) -> Finding:
    requests = scale.pick(_REQUESTS // 2, _REQUESTS_OF_FULL)
    found = compare(SHORT_OF_MEMORY, VARIANTS, requests, scale, run)
    whole = [one for one in found.places if one[1] == ADAPTIVE.label]
    ours = {
        "parts throughput": found.mean_ratio(whole, throughput),
        "parts preemptions": found.over_throttling(whole[-1], _PREEMPTIONS),
    }
    return Finding(claims("adaptive", ours), None, [*map(found.row, found.places)])


PAPER = Paper(
    title="adaptive over throttling (ours, after gLLM)",
    setting=(
        f"{_REQUESTS} requests a run, {_REQUESTS // 2} for the parts",
        f"{_REQUESTS_OF_FULL:,d} requests a run",
    ),
    figures=[
        PaperFigure(
            number="list",
            title="adaptive over throttling",
            make=_list,
            columns=[*columns(("", "model")), *_COLUMNS],
        ),
        PaperFigure(
            number="parts",
            title="where memory is short: the parts of adaptive, over throttling",
            make=_parts,
            columns=[*columns(("", "policy")), *_COLUMNS],
        ),
    ],
)
