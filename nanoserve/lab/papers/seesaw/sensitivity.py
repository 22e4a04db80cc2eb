"""Seesaw's figures 12 to 14: where the time goes, and how the gain depends on answers and on the
links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.cases import Case, Metric, Runs, over_seeds, with_budget
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.observers import Breakdown
from nanoserve.lab.papers.seesaw.search import BestBudget, seconds
from nanoserve.lab.papers.seesaw.settings import A10, RESHARDING, WHOLE_PROMPTS, closed_batch
from nanoserve.layout import ParallelLayout


def _with_layouts(case: Case, name: str) -> Case:
    """The case with a layout, or with a pair such as P8->T8 between which Seesaw changes."""
    layouts = tuple(map(ParallelLayout.parse, name.split("->")))
    if len(layouts) == 2:
        case = replace(case, system=RESHARDING)
    return replace(case, layouts=layouts)


_WHOLE_BUDGET = 4096
"""The longest request in one step, as vLLM's default; systems that take whole prompts have no chunk
to be tuned."""
_PARTS = Breakdown.__struct_fields__
_TIMES = (
    ("total", "tensor", "seesaw"),
    ("total", "pipeline", "seesaw"),
    ("total", "chunked", "seesaw"),
    ("prefill", "tensor", "pipeline"),
    ("decode", "pipeline", "tensor"),
    ("prefill", "seesaw", "pipeline"),
    ("decode", "seesaw", "tensor"),
)
"""A part of the time, and the two systems that are compared."""


_PARTS_AND_TOTAL = (*_PARTS, "total")
BREAKDOWN_COLUMNS = columns(
    ("", ("layout", "system")),
    ("<", "policy"),
    ("d", ("tokens of a step", "budget")),
    (",.0f", *((f"{part} s", part) for part in _PARTS_AND_TOTAL)),
)


def breakdown(scale: Scale, run: Run) -> Finding:
    """Figure 12: what the end-to-end time is made of."""
    setting = closed_batch(
        "codellama-34b", A10, 4, "arxiv", scale.pick(250, 500), seed=scale.seeds[0]
    )
    whole = with_budget(replace(setting, system=WHOLE_PROMPTS), _WHOLE_BUDGET)
    tuned = [BestBudget(case=_with_layouts(setting, name)) for name in ("P4->T4", "T2P2")]
    found = run(tuned)
    # without chunked prefill, to show how long prompts and answers take each; Seesaw; the best
    # static one
    systems = {
        "tensor": _with_layouts(whole, "T4"),
        "pipeline": _with_layouts(whole, "P4"),
        "seesaw": found[tuned[0]],
        "chunked": found[tuned[1]],
    }
    runs = Runs(run, {name: over_seeds(case, scale.seeds) for name, case in systems.items()})
    parts: dict[str, Metric] = {part: attrgetter(f"breakdown.{part}") for part in _PARTS_AND_TOTAL}
    ours = {
        f"12 {part} {above} {below}": runs.ratio(above, below, parts[part])
        for part, above, below in _TIMES
    }
    names = ["tp4", "pp4", "p4->t4", "tp2pp2\n+chunked prefill"]
    heights = {part: [runs.mean(one, parts[part]) for one in systems] for part in _PARTS}
    stacks = panel(
        f"{setting.requests} of arxiv", "", "end-to-end time (s)", names, heights, kind="stack"
    )
    rows = [
        {"system": one.layout_name, "policy": one.system.policy, "budget": one.system.token_budget}
        | runs.means(name, parts)
        for name, one in systems.items()
    ]
    return Finding(claims("seesaw", ours), Chart("Seesaw, figure 12: 34B on 4 A10", [stacks]), rows)


_INPUT = 3000
_STATIC = {"pp8": "P8", "tp2pp4": "T2P4", "tp4pp2": "T4P2"}
_PAIR = "pp8->tp4pp2"
_LAYOUTS = {**_STATIC, _PAIR: "P8->T4P2"}
"""Layouts by the paper's names."""


OUTPUT_COLUMNS = columns(
    ("d", ("output tokens", "output")),
    (".3f", *((f"{name} req/s", name) for name in _LAYOUTS)),
    ("", ("best static", "best")),
    (".2f", "gain"),
)


def output_length(scale: Scale, run: Run) -> Finding:
    """Figure 13: throughput against output over input length."""
    outputs = scale.pick(
        (1, 60, 150, 300, 600, 900), (1, 30, 75, 120, 150, 225, 300, 450, 600, 750, 900)
    )
    requests = scale.pick(80, 400)
    settings = [
        closed_batch("llama-2-70b", A10, 8, f"{_INPUT}+{output}", requests) for output in outputs
    ]
    grid = _grid(settings, list(_LAYOUTS.values()), run)
    rates = [
        {name: requests / time for name, time in zip(_LAYOUTS, row, strict=True)} for row in grid
    ]
    winners = [max(_STATIC, key=one.__getitem__) for one in rates]
    gains = [one[_PAIR] / one[winner] for one, winner in zip(rates, winners, strict=True)]
    top = max(max(one.values()) for one in rates)
    order, changes = [list(_STATIC).index(winner) for winner in winners], 0
    if order == sorted(order):
        changes = len(set(order)) - 1
    ours = {
        "13 smallest": min(gains),
        "13 order": changes,
        "13 one token": rates[0]["pp8"] / rates[0]["tp4pp2"],
    }
    curves = panel(
        f"prompts of {_INPUT:,} tokens",
        "D:P, output tokens over input tokens",
        "throughput (normalized)",
        [output / _INPUT for output in outputs],
        {name: [one[name] / top for one in rates] for name in rates[0]},
        styles={_PAIR: "k^-"},
    )
    rows = [
        {"output": output, "best": winner, "gain": gain, **one}
        for output, winner, gain, one in zip(outputs, winners, gains, rates, strict=True)
    ]
    found = claims("seesaw", ours, winners=", ".join(winners))
    return Finding(found, Chart("Seesaw, figure 13: 70B on 8 A10", [curves]), rows)


def _grid(settings: Sequence[Case], layouts: Sequence[str], run: Run) -> list[list[float]]:
    """Seconds with every layout or pair, each with its best budget, in every setting."""
    jobs = [
        [BestBudget(case=_with_layouts(setting, name)) for name in layouts] for setting in settings
    ]
    tuned = run(job for row in jobs for job in row)
    cases = [[tuned[job] for job in row] for row in jobs]
    outcomes = run(case for row in cases for case in row)
    return [[seconds(outcomes[case]) for case in row] for row in cases]


ALL_STATIC = {
    "d1t1p8": "P8",
    "d2t1p4": "D2P4",
    "d1t2p4": "T2P4",
    "d2t2p2": "D2T2P2",
    "d1t4p2": "T4P2",
    "d2t4p1": "D2T4",
    "d1t8p1": "T8",
}
"""All layouts of CodeLLaMA-34B on eight A10 in which it fits."""
_PAIRS = {"d2p4->d2t4": "D2P4->D2T4", "d1p8->d1t8": "P8->T8"}
"""The paper's pair, and the one that the search finds best at the bandwidth of PCIe."""
_OF_BANDWIDTH = (*ALL_STATIC, *_PAIRS)
_PAIR_STYLES = dict(zip(_PAIRS, ("k^-", "k^--"), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthPoint:
    """Seconds at one bandwidth, by name of the configuration."""

    factor: float  # the bandwidth, over that of PCIe
    static: Mapping[str, float]
    pairs: Mapping[str, float]

    @property
    def winner(self) -> str:
        """The best static one."""
        return min(self.static, key=self.static.__getitem__)

    @property
    def gain(self) -> float:
        """Throughput of the best pair over that of the best static one."""
        return self.static[self.winner] / min(self.pairs.values())

    @property
    def stages(self) -> int:
        """Pipeline stages of the best static one."""
        return int(self.winner.rpartition("p")[2])


def _points(scale: Scale, run: Run) -> list[BandwidthPoint]:
    setting = closed_batch(
        "codellama-34b", A10, 8, "arxiv", scale.pick(250, 500), seed=scale.seeds[0]
    )
    factors = scale.pick(
        (0.1, 0.3, 1.0, 5.0, 50.0), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    )
    settings = [replace(setting, all_reduce_scale=factor) for factor in factors]
    grid = _grid(settings, [*ALL_STATIC.values(), *_PAIRS.values()], run)
    points = []
    for factor, row in zip(factors, grid, strict=True):
        static = dict(zip(ALL_STATIC, row, strict=False))
        pairs = dict(zip(_PAIRS, row[len(ALL_STATIC) :], strict=True))
        points.append(BandwidthPoint(factor=factor, static=static, pairs=pairs))
    return points


BANDWIDTH_COLUMNS = columns(
    ("g", ("bandwidth x", "factor")),
    (",.0f", *((f"{name} s", name) for name in _OF_BANDWIDTH)),
    ("", ("best static", "best")),
    (".2f", "gain"),
)


def bandwidth(scale: Scale, run: Run) -> Finding:
    """Figure 14: throughput against the bandwidth of all-reduces."""
    points = _points(scale, run)
    seconds = {
        name: [{**point.static, **point.pairs}[name] for point in points] for name in _OF_BANDWIDTH
    }
    fastest = min(min(each) for each in seconds.values())
    curves = panel(
        f"{scale.pick(250, 500)} of arxiv",
        "bandwidth scale (x all-reduce through PCIe)",
        "throughput (normalized)",
        [point.factor for point in points],
        {name: [fastest / one for one in each] for name, each in seconds.items()},
        styles=_PAIR_STYLES,
        log_x=True,
    )
    rows = [
        {
            "factor": point.factor,
            "best": point.winner,
            "gain": point.gain,
            **point.static,
            **point.pairs,
        }
        for point in points
    ]
    upward = [point for point in points if point.factor >= 1]
    slow, fast = points[0], points[-1]
    ours = {
        "14 PCIe": upward[0].gain,
        "14 falls": max(after.gain - before.gain for before, after in pairwise(upward)),
        "14 smallest": min(point.gain for point in points),
        "14 slow": slow.stages,
        "14 fast": fast.stages,
    }
    gains = ", ".join(f"{point.gain:.2f} at {point.factor:g}x" for point in points)
    found = claims("seesaw", ours, gains=gains, slow=slow.winner, fast=fast.winner)
    return Finding(found, Chart("Seesaw, figure 14: 34B on 8 A10", [curves]), rows)
