"""Seesaw's figures 12 to 14: where the time goes, and how the gain depends on answers and on the links."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanoserve.benchmarks.tables import Column
from nanoserve.costs import ParallelLayout
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.estimate import BestBudget
from nanoserve.papers.seesaw.runs import Breakdown, ClosedBatch, Outcome
from nanoserve.papers.seesaw.search import over_seeds
from nanoserve.papers.seesaw.settings import RESHARDING, WHOLE_PROMPTS, Choice, Setting
from nanoserve.papers.seesaw.throughput import A10


def _layout(tensor: int, pipeline: int, data: int = 1) -> ParallelLayout:
    return ParallelLayout(tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=data)


def _tuned(setting: Setting, choices: Sequence[Choice], run: Run) -> list[Choice]:
    """Each with the token budget that suits it best, by the estimate."""
    jobs = [BestBudget(setting=setting, choice=choice) for choice in choices]
    outcomes = run(jobs)
    return [outcomes[job] for job in jobs]


# ---- figure 12 --------------------------------------------------------------------------------------------------

_WHOLE_BUDGET = 4096
"""The longest request in one step, as vLLM's default; systems that take whole prompts have no chunk to be tuned."""
_SYSTEMS = (
    Choice(prefill=_layout(4, 1), policy=WHOLE_PROMPTS, token_budget=_WHOLE_BUDGET),
    Choice(prefill=_layout(1, 4), policy=WHOLE_PROMPTS, token_budget=_WHOLE_BUDGET),
    Choice(prefill=_layout(1, 4), decode=_layout(4, 1), policy=RESHARDING),
    Choice(prefill=_layout(2, 2)),
)
"""TP4 and PP4 without chunked prefill, to show how long prompts and answers take each; Seesaw; the best static one."""


def breakdown(scale: Scale, run: Run) -> Finding:
    """Figure 12: what the end-to-end time is made of."""
    setting = Setting(
        model="codellama-34b",
        machine=A10,
        devices=4,
        lengths="arxiv",
        requests=scale.pick(250, 500),
        seed=scale.seeds[0],
    )
    choices = [*_SYSTEMS[:2], *_tuned(setting, _SYSTEMS[2:], run)]
    batches = [over_seeds(setting, choice, scale.seeds) for choice in choices]
    outcomes = run(batch for each in batches for batch in each)
    found = [[outcomes[batch] for batch in each] for each in batches]
    rows = [
        {
            "system": choice.label,
            "policy": choice.policy,
            "budget": choice.token_budget,
            **{part: _mean(each, part) for part in (*Breakdown.__struct_fields__, "total")},
        }
        for choice, each in zip(choices, found, strict=True)
    ]
    columns = [
        Column("layout", "system"),
        Column("policy", "policy", justify="left"),
        Column("tokens of a step", "budget", "d"),
        *(Column(f"{part} s", part, ",.0f") for part in (*Breakdown.__struct_fields__, "total")),
    ]
    return Finding(_claims_12(*found), _chart_12(setting, found), rows, columns)


def _chart_12(setting: Setting, found: Sequence[Sequence[Outcome]]) -> Chart:
    names = ("tp4", "pp4", "p4->t4", "tp2pp2\n+chunked prefill")
    panel = Panel(
        title=f"{setting.requests} of arxiv",
        x="",
        y="end-to-end time (s)",
        kind="stack",
        curves=tuple(
            Curve(label=part, xs=names, ys=tuple(_mean(each, part) for each in found))
            for part in Breakdown.__struct_fields__
        ),
    )
    return Chart(title="Seesaw, figure 12: 34B on 4 A10", panels=(panel,))


def _claims_12(
    tensor: Sequence[Outcome], pipeline: Sequence[Outcome], seesaw: Sequence[Outcome], chunked: Sequence[Outcome]
) -> list[Claim]:
    return [
        _claim_12("total time: TP4 over P4->T4", "more", _ratio(tensor, seesaw, "total"), 1.0),
        _claim_12("total time: PP4 over P4->T4", "more", _ratio(pipeline, seesaw, "total"), 1.0),
        _claim_12("total time: TP2PP2 with chunked prefill over P4->T4", "more", _ratio(chunked, seesaw, "total"), 1.0),
        _claim_12("prefill time: TP4 over PP4", "more", _ratio(tensor, pipeline, "prefill"), 1.1),
        _claim_12("decode time: PP4 over TP4", "more", _ratio(pipeline, tensor, "decode"), 1.1),
        _claim_12("prefill time: P4->T4 over PP4", "comparable", _ratio(seesaw, pipeline, "prefill"), 0.7, 1.25),
        _claim_12("decode time: P4->T4 over TP4", "comparable", _ratio(seesaw, tensor, "decode"), 0.7, 1.25),
    ]


def _mean(outcomes: Sequence[Outcome], part: str) -> float:
    return Spread.of(getattr(one.breakdown, part) for one in outcomes).mean


def _ratio(above: Sequence[Outcome], below: Sequence[Outcome], part: str) -> Spread:
    pairs = zip(above, below, strict=True)
    return Spread.of(getattr(one.breakdown, part) / getattr(other.breakdown, part) for one, other in pairs)


def _claim_12(says: str, paper: str, ours: Spread, at_least: float, at_most: float | None = None) -> Claim:
    return Claim(
        figure="12",
        says=says,
        paper=paper,
        ours=ours,
        form="{:.2f}x",
        at_least=at_least,
        at_most=at_most,
        assumption="time by what a stage computes; all-reduces at 75 % of PCIe 4.0 x8",
    )


# ---- figure 13 --------------------------------------------------------------------------------------------------

_INPUT = 3000
_STATIC = {"pp8": _layout(1, 8), "tp2pp4": _layout(2, 4), "tp4pp2": _layout(4, 2)}
_PAIR = "pp8->tp4pp2"


def output_length(scale: Scale, run: Run) -> Finding:
    """Figure 13: throughput against output over input length."""
    outputs = scale.pick((1, 60, 150, 300, 600, 900), (1, 30, 75, 120, 150, 225, 300, 450, 600, 750, 900))
    choices = [Choice(prefill=layout) for layout in _STATIC.values()]
    choices.append(Choice(prefill=_STATIC["pp8"], decode=_STATIC["tp4pp2"], policy=RESHARDING))
    requests = scale.pick(80, 400)
    settings = [
        Setting(model="llama-2-70b", machine=A10, devices=8, lengths=f"{_INPUT}+{output}", requests=requests)
        for output in outputs
    ]
    rates = [
        dict(zip((*_STATIC, _PAIR), (requests / seconds for seconds in row), strict=True))
        for row in _grid(settings, choices, run)
    ]
    winners = [max(_STATIC, key=one.__getitem__) for one in rates]
    gains = [one[_PAIR] / one[winner] for one, winner in zip(rates, winners, strict=True)]
    top = max(max(one.values()) for one in rates)
    panel = Panel(
        title=f"input {_INPUT:,}",
        x="D:P, output tokens over input tokens",
        y="throughput (normalized)",
        curves=tuple(
            Curve(
                label=name,
                xs=tuple(output / _INPUT for output in outputs),
                ys=tuple(one[name] / top for one in rates),
                style="k^-" if name == _PAIR else "o-",
            )
            for name in rates[0]
        ),
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
    claims = _claims_13(rates, winners, gains)
    return Finding(claims, Chart(title="Seesaw, figure 13: 70B on 8 A10", panels=(panel,)), rows, columns)


def _claims_13(rates: Sequence[Mapping[str, float]], winners: Sequence[str], gains: Sequence[float]) -> list[Claim]:
    order = [list(_STATIC).index(winner) for winner in winners]
    return [
        Claim(
            figure="13",
            says="never below the static layouts: the smallest gain over all output lengths",
            paper="1.0x or more",
            ours=Spread.of([min(gains)]),
            form="{:.2f}x",
            at_least=0.98,
            assumption="fixed lengths, so no spread over seeds; closed batches",
        ),
        Claim(
            figure="13",
            says="as outputs grow the best static one goes PP8, TP2PP4, TP4PP2: changes in that order",
            paper="2",
            ours=Spread.of([len(set(order)) - 1 if order == sorted(order) else 0]),
            form="{:.0f}",
            at_least=2,
            assumption="each layout with the chunk that suits it; best were " + ", ".join(winners),
        ),
        Claim(
            figure="13",
            says="one output token: PP8 over TP4PP2",
            paper="more",
            ours=Spread.of([rates[0]["pp8"] / rates[0]["tp4pp2"]]),
            form="{:.2f}x",
            at_least=1.3,
            assumption="all-reduces at 75 % of PCIe 4.0 x8",
        ),
    ]


def _grid(settings: Sequence[Setting], choices: Sequence[Choice], run: Run) -> list[list[float]]:
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
class Point:
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
        """Of the best static one."""
        return int(self.winner.rpartition("p")[2])


def _points(scale: Scale, run: Run) -> list[Point]:
    settings = [
        Setting(
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
        *(Choice(prefill=layout) for layout in layouts.values()),
        *(Choice(prefill=first, decode=second, policy=RESHARDING) for first, second in _PAIRS.values()),
    ]
    return [
        Point(
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
    panel = Panel(
        title=f"{scale.pick(250, 500)} of arxiv",
        x="bandwidth scale (x all-reduce through PCIe)",
        y="throughput (normalized)",
        curves=tuple(
            Curve(
                label=name,
                xs=tuple(point.factor for point in points),
                ys=tuple(fastest / one for one in each),
                style=_PAIR_STYLES.get(name, "o-"),
            )
            for name, each in seconds.items()
        ),
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
    return Finding(_claims_14(points), Chart(title="Seesaw, figure 14: 34B on 8 A10", panels=(panel,)), rows, columns)


def _claims_14(points: Sequence[Point]) -> list[Claim]:
    upward = [point for point in points if point.factor >= 1]
    rises = [after.gain - before.gain for before, after in pairwise(upward)]
    gains = ", ".join(f"{point.gain:.2f} at {point.factor:g}x" for point in points)
    slow, fast = points[0], points[-1]
    return [
        _claim_14(
            "gain of the best pair at the bandwidth of PCIe",
            "above 1 (curves)",
            upward[0].gain,
            at_least=1.05,
            assumption="the whole time of an all-reduce is scaled, as in the paper; the host's link is not",
        ),
        _claim_14(
            "from there on the gain falls: largest rise from one bandwidth to the next",
            "none",
            max(rises),
            "{:+.2f}",
            at_most=0.02,
            assumption=f"gains were {gains}",
        ),
        _claim_14(
            "superior from 0.1x to 50x: the smallest gain",
            "1.0x or more",
            min(point.gain for point in points),
            at_least=0.98,
            assumption="at the fast end T8 alone computes prompts beside answers in one step, and Seesaw never does",
        ),
        _claim_14(
            "at the slow end a pipeline is the best static one: its stages",
            "4 or 8",
            slow.stages,
            "{:.0f}",
            at_least=4,
            assumption=f"best was {slow.winner}",
        ),
        _claim_14(
            "at the fast end tensor parallelism is the best static one: its stages",
            "1",
            fast.stages,
            "{:.0f}",
            at_most=1,
            assumption=f"best was {fast.winner}",
        ),
    ]


def _claim_14(
    says: str,
    paper: str,
    ours: float,
    form: str = "{:.2f}x",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    assumption: str,
) -> Claim:
    return Claim(
        figure="14",
        says=says,
        paper=paper,
        ours=Spread.of([ours]),
        form=form,
        at_least=at_least,
        at_most=at_most,
        assumption=assumption,
    )
