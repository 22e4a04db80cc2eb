"""Seesaw's figures 12 to 14: where the time goes, and how the gain depends on answers and on the links."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanoserve.benchmarks.tables import Column
from nanoserve.costs import ParallelLayout
from nanoserve.papers.cases import Runs
from nanoserve.papers.charts import Chart, panel
from nanoserve.papers.claims import ClaimRow, claims
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.estimate import BestBudget
from nanoserve.papers.seesaw.runs import BatchOutcome, Breakdown, ClosedBatch
from nanoserve.papers.seesaw.search import over_seeds
from nanoserve.papers.seesaw.settings import RESHARDING, WHOLE_PROMPTS, LayoutChoice, OfflineBatch
from nanoserve.papers.seesaw.throughput import A10


def _layout(tensor: int, pipeline: int, data: int = 1) -> ParallelLayout:
    return ParallelLayout(tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data)


# ---- figure 12 --------------------------------------------------------------------------------------------------

_WHOLE_BUDGET = 4096
"""The longest request in one step, as vLLM's default; systems that take whole prompts have no chunk to be tuned."""
_SYSTEMS = (
    LayoutChoice(prefill=_layout(4, 1), policy=WHOLE_PROMPTS, token_budget=_WHOLE_BUDGET),
    LayoutChoice(prefill=_layout(1, 4), policy=WHOLE_PROMPTS, token_budget=_WHOLE_BUDGET),
    LayoutChoice(prefill=_layout(1, 4), decode=_layout(4, 1), policy=RESHARDING),
    LayoutChoice(prefill=_layout(2, 2)),
)
"""TP4 and PP4 without chunked prefill, to show how long prompts and answers take each; Seesaw; the best static one."""


def breakdown(scale: Scale, run: Run) -> Finding:
    """Figure 12: what the end-to-end time is made of."""
    setting = OfflineBatch(
        model="codellama-34b",
        machine=A10,
        devices=4,
        lengths="arxiv",
        requests=scale.pick(250, 500),
        seed=scale.seeds[0],
    )
    tuned = [BestBudget(setting=setting, choice=choice) for choice in _SYSTEMS[2:]]
    found = run(tuned)
    choices = [*_SYSTEMS[:2], *(found[job] for job in tuned)]
    runs = Runs(run, {choice: over_seeds(setting, choice, scale.seeds) for choice in choices})
    parts = {part: _seconds_of(part) for part in (*Breakdown.__struct_fields__, "total")}
    tensor, pipeline, seesaw, chunked = choices
    why = "time by what a stage computes; all-reduces at 75 % of PCIe 4.0 x8"
    rows: list[ClaimRow] = [
        (f"{part} time: {says}", paper, runs.ratio(above, below, parts[part]), asked, why)
        for part, says, paper, above, below, asked in (
            ("total", "TP4 over P4->T4", "more", tensor, seesaw, "at least 1.00x"),
            ("total", "PP4 over P4->T4", "more", pipeline, seesaw, "at least 1.00x"),
            ("total", "TP2PP2 with chunked prefill over P4->T4", "more", chunked, seesaw, "at least 1.00x"),
            ("prefill", "TP4 over PP4", "more", tensor, pipeline, "at least 1.10x"),
            ("decode", "PP4 over TP4", "more", pipeline, tensor, "at least 1.10x"),
            ("prefill", "P4->T4 over PP4", "comparable", seesaw, pipeline, "0.70x to 1.25x"),
            ("decode", "P4->T4 over TP4", "comparable", seesaw, tensor, "0.70x to 1.25x"),
        )
    ]
    names = ["tp4", "pp4", "p4->t4", "tp2pp2\n+chunked prefill"]
    heights = {part: [runs.mean(one, parts[part]) for one in choices] for part in Breakdown.__struct_fields__}
    stacks = panel(f"{setting.requests} of arxiv", "", "end-to-end time (s)", names, heights, kind="stack")
    return Finding(
        claims("12", rows),
        Chart("Seesaw, figure 12: 34B on 4 A10", [stacks]),
        [
            {"system": one.label, "policy": one.policy, "budget": one.token_budget, **runs.means(one, parts)}
            for one in choices
        ],
        [
            Column("layout", "system"),
            Column("policy", "policy", justify="left"),
            Column("tokens of a step", "budget", "d"),
            *(Column(f"{part} s", part, ",.0f") for part in parts),
        ],
    )


def _seconds_of(part: str) -> Callable[[BatchOutcome], float]:
    return lambda outcome: getattr(outcome.breakdown, part)


# ---- figure 13 --------------------------------------------------------------------------------------------------

_INPUT = 3000
_STATIC = {"pp8": _layout(1, 8), "tp2pp4": _layout(2, 4), "tp4pp2": _layout(4, 2)}
_PAIR = "pp8->tp4pp2"


def output_length(scale: Scale, run: Run) -> Finding:
    """Figure 13: throughput against output over input length."""
    outputs = scale.pick((1, 60, 150, 300, 600, 900), (1, 30, 75, 120, 150, 225, 300, 450, 600, 750, 900))
    choices = [LayoutChoice(prefill=layout) for layout in _STATIC.values()]
    choices.append(LayoutChoice(prefill=_STATIC["pp8"], decode=_STATIC["tp4pp2"], policy=RESHARDING))
    requests = scale.pick(80, 400)
    settings = [
        OfflineBatch(model="llama-2-70b", machine=A10, devices=8, lengths=f"{_INPUT}+{output}", requests=requests)
        for output in outputs
    ]
    rates = [
        dict(zip((*_STATIC, _PAIR), (requests / seconds for seconds in row), strict=True))
        for row in _grid(settings, choices, run)
    ]
    winners = [max(_STATIC, key=one.__getitem__) for one in rates]
    gains = [one[_PAIR] / one[winner] for one, winner in zip(rates, winners, strict=True)]
    top = max(max(one.values()) for one in rates)
    order = [list(_STATIC).index(winner) for winner in winners]
    found: list[ClaimRow] = [
        (
            "never below the static layouts: the smallest gain over all output lengths",
            "1.0x or more",
            min(gains),
            "at least 0.98x",
            "fixed lengths, so no spread over seeds; closed batches",
        ),
        (
            "as outputs grow the best static one goes PP8, TP2PP4, TP4PP2: changes in that order",
            "2",
            len(set(order)) - 1 if order == sorted(order) else 0,
            "at least 2",
            "each layout with the chunk that suits it; best were " + ", ".join(winners),
        ),
        (
            "one output token: PP8 over TP4PP2",
            "more",
            rates[0]["pp8"] / rates[0]["tp4pp2"],
            "at least 1.30x",
            "all-reduces at 75 % of PCIe 4.0 x8",
        ),
    ]
    curves = panel(
        f"input {_INPUT:,}",
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
    columns = [
        Column("output tokens", "output", "d"),
        *(Column(f"{name} req/s", name, ".3f") for name in rates[0]),
        Column("best static", "best"),
        Column("gain", "gain", ".2f"),
    ]
    return Finding(claims("13", found), Chart("Seesaw, figure 13: 70B on 8 A10", [curves]), rows, columns)


def _grid(settings: Sequence[OfflineBatch], choices: Sequence[LayoutChoice], run: Run) -> list[list[float]]:
    """Seconds of every configuration, each with its best budget, in every setting."""
    jobs = [[BestBudget(setting=setting, choice=choice) for choice in choices] for setting in settings]
    tuned = run(job for row in jobs for job in row)
    batches = [[ClosedBatch(setting=job.setting, choice=tuned[job]) for job in row] for row in jobs]
    outcomes = run(batch for row in batches for batch in row)
    return [[outcomes[batch].seconds for batch in row] for row in batches]


# ---- figure 14 --------------------------------------------------------------------------------------------------

_PAIRS = {"d2p4->d2t4": (_layout(1, 4, 2), _layout(4, 1, 2)), "d1p8->d1t8": (_layout(1, 8), _layout(8, 1))}
"""The paper's pair, and the one that the search finds best at the bandwidth of PCIe."""
_PAIR_STYLES = dict(zip(_PAIRS, ("k^-", "k^--"), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class BandwidthPoint:
    """Seconds at one bandwidth, by name of the configuration."""

    factor: float
    """The bandwidth, over that of PCIe."""
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
    settings = [
        OfflineBatch(
            model="codellama-34b",
            machine=A10,
            devices=8,
            lengths="arxiv",
            requests=scale.pick(250, 500),
            all_reduce_scale=factor,
            seed=scale.seeds[0],
        )
        for factor in scale.pick((0.1, 0.3, 1.0, 5.0, 50.0), (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0))
    ]
    layouts = {_paper_name(layout): layout for layout in settings[0].layouts()}
    choices = [
        *(LayoutChoice(prefill=layout) for layout in layouts.values()),
        *(LayoutChoice(prefill=first, decode=second, policy=RESHARDING) for first, second in _PAIRS.values()),
    ]
    return [
        BandwidthPoint(
            factor=setting.all_reduce_scale,
            static=dict(zip(layouts, row, strict=False)),
            pairs=dict(zip(_PAIRS, row[len(layouts) :], strict=True)),
        )
        for setting, row in zip(settings, _grid(settings, choices, run), strict=True)
    ]


def _paper_name(layout: ParallelLayout) -> str:
    return f"d{layout.data_parallel}t{layout.tensor_parallel}p{layout.pipeline_parallel}"


def bandwidth(scale: Scale, run: Run) -> Finding:
    """Figure 14: throughput against the bandwidth of all-reduces."""
    points = _points(scale, run)
    names = (*points[0].static, *points[0].pairs)
    seconds = {name: [{**point.static, **point.pairs}[name] for point in points] for name in names}
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
        {"factor": point.factor, "best": point.winner, "gain": point.gain, **point.static, **point.pairs}
        for point in points
    ]
    columns = [
        Column("bandwidth x", "factor", "g"),
        *(Column(f"{name} s", name, ",.0f") for name in names),
        Column("best static", "best"),
        Column("gain", "gain", ".2f"),
    ]
    chart = Chart("Seesaw, figure 14: 34B on 8 A10", [curves])
    return Finding(claims("14", _bandwidth_claims(points)), chart, rows, columns)


def _bandwidth_claims(points: Sequence[BandwidthPoint]) -> list[ClaimRow]:
    upward = [point for point in points if point.factor >= 1]
    gains = ", ".join(f"{point.gain:.2f} at {point.factor:g}x" for point in points)
    slow, fast = points[0], points[-1]
    return [
        (
            "gain of the best pair at the bandwidth of PCIe",
            "above 1 (curves)",
            upward[0].gain,
            "at least 1.05x",
            "the whole time of an all-reduce is scaled, as in the paper; the host's link is not",
        ),
        (
            "from there on the gain falls: largest rise from one bandwidth to the next",
            "none",
            max(after.gain - before.gain for before, after in pairwise(upward)),
            "at most +0.02",
            f"gains were {gains}",
        ),
        (
            "superior from 0.1x to 50x: the smallest gain",
            "1.0x or more",
            min(point.gain for point in points),
            "at least 0.98x",
            "at the fast end T8 alone computes prompts beside answers in one step, and Seesaw never does",
        ),
        (
            "at the slow end a pipeline is the best static one: its stages",
            "4 or 8",
            slow.stages,
            "at least 4",
            f"best was {slow.winner}",
        ),
        (
            "at the fast end tensor parallelism is the best static one: its stages",
            "1",
            fast.stages,
            "at most 1",
            f"best was {fast.winner}",
        ),
    ]
