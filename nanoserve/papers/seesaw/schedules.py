"""Seesaw's figures 2 and 6: three ways to schedule changes of the layout, and both tiers of the KV cache over time.

With all of the paper's host memory, all prompts of its batches fit there and the layout changes once. Here the pool is
smaller, so that it fills and empties several times: as it would with more requests.
"""

from collections.abc import Callable, Sequence

import msgspec

from nanoserve.benchmarks.tables import Column
from nanoserve.costs import ParallelLayout
from nanoserve.costs.hardware import GIBI
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.runs import FREQUENT, RARE, ClosedBatch, Outcome
from nanoserve.papers.seesaw.search import over_seeds
from nanoserve.papers.seesaw.settings import RESHARDING, Choice, Setting
from nanoserve.papers.seesaw.throughput import A10

_POOL_BYTES_PER_DEVICE = 10 * GIBI
"""An eighth of the paper's; still 1.7 times what the devices hold beside the weights."""
_POLICIES = (RESHARDING, FREQUENT, RARE)


def _setting(scale: Scale) -> Setting:
    return Setting(
        model="codellama-34b",
        machine=A10,
        devices=4,
        lengths="arxiv",
        requests=scale.pick(250, 1000),
        host_bytes_per_device=_POOL_BYTES_PER_DEVICE,
        seed=scale.seeds[0],
    )


def _batches(scale: Scale, policy: str) -> list[ClosedBatch]:
    choice = Choice(
        prefill=ParallelLayout(pipeline_parallel=4), decode=ParallelLayout(tensor_parallel=4), policy=policy
    )
    return over_seeds(_setting(scale), choice, scale.seeds)


# ---- figure 2 ---------------------------------------------------------------------------------------------------


def three_schedules(scale: Scale, run: Run) -> Finding:
    """Figure 2: three ways to schedule transitions."""
    batches = {policy: _batches(scale, policy) for policy in _POLICIES}
    outcomes = run(batch for each in batches.values() for batch in each)
    found = {policy: [outcomes[batch] for batch in each] for policy, each in batches.items()}
    seesaw, frequent, rare = (found[policy] for policy in _POLICIES)
    claims = [
        _claim("transitions of Seesaw, with a small pool", "several", _over(seesaw, _transitions), "{:.0f}", 3),
        _claim("time in transitions: Seesaw", "small", _over(seesaw, _share), "{:.1f} %", at_most=10),
        _claim("time in transitions: prefill-prioritizing", "large", _over(frequent, _share), "{:.1f} %", 20),
        _claim("time in transitions: decode-prioritizing", "small", _over(rare, _share), "{:.1f} %", at_most=10),
        _claim(
            "answers on the devices: Seesaw over decode-prioritizing", "more", _fuller(seesaw, rare), "{:.2f}x", 1.2
        ),
        _claim("throughput over prefill-prioritizing", "more", _faster(frequent, seesaw), "{:.2f}x", 1.0),
        _claim("throughput over decode-prioritizing", "more", _faster(rare, seesaw), "{:.2f}x", 1.0),
    ]
    rows = [
        {
            "policy": policy,
            "seconds": _over(each, lambda one: one.seconds).mean,
            "transitions": _over(each, _transitions).mean,
            "share": _over(each, _share).mean,
            "decodes": _over(each, _decodes).mean,
        }
        for policy, each in found.items()
    ]
    panels = tuple(
        _schedule(title, found[policy][0])
        for title, policy in (
            ("(a) prefill-prioritizing", FREQUENT),
            ("(b) decode-prioritizing", RARE),
            ("(c) tiered, transition-minimizing", RESHARDING),
        )
    )
    columns = [
        Column("policy", "policy"),
        Column("seconds", "seconds", ",.0f"),
        Column("transitions", "transitions", ",.0f"),
        Column("% of the time in them", "share", ".1f"),
        Column("answers of a decode step", "decodes", ".1f"),
    ]
    chart = Chart(title="Seesaw, figure 2: 34B on 4 A10, P4->T4, a pool of 40 GiB", panels=panels, columns=3)
    return Finding(claims, chart, rows, columns)


def _transitions(one: Outcome) -> float:
    return one.result.transitions


def _share(one: Outcome) -> float:
    """Percent of the time that transitions take, waiting for the pipeline to empty not counted."""
    return 100 * one.breakdown.transition / one.seconds


def _decodes(one: Outcome) -> float:
    """Answers of a step without prompts, on average over time."""
    return one.decodes


def _over(outcomes: Sequence[Outcome], figure: Callable[[Outcome], float]) -> Spread:
    return Spread.of(figure(one) for one in outcomes)


def _fuller(above: Sequence[Outcome], below: Sequence[Outcome]) -> Spread:
    return Spread.of(_decodes(one) / _decodes(other) for one, other in zip(above, below, strict=True))


def _faster(slow: Sequence[Outcome], fast: Sequence[Outcome]) -> Spread:
    return Spread.of(one.seconds / other.seconds for one, other in zip(slow, fast, strict=True))


def _claim(
    says: str, paper: str, ours: Spread, form: str, at_least: float | None = None, at_most: float | None = None
) -> Claim:
    return Claim(
        figure="2",
        says=says,
        paper=paper,
        ours=ours,
        form=form,
        at_least=at_least,
        at_most=at_most,
        assumption="10 GiB of host memory per GPU instead of 80; weights come at 75 % of PCIe 4.0 x8",
    )


def _schedule(title: str, one: Outcome) -> Panel:
    """Sequences of each step over time, as the figure draws them."""
    series = one.result.tokens_series
    return Panel(
        title=f"{title}: {one.seconds:,.0f} s",
        x="time (s)",
        y="answers of a step",
        curves=(
            Curve(label="", xs=tuple(point[0] for point in series), ys=tuple(point[2] for point in series), style="-"),
        ),
    )


# ---- figure 6 ---------------------------------------------------------------------------------------------------


def tiers(scale: Scale, run: Run) -> Finding:
    """Figure 6: occupancy of both tiers over time, with the phases."""
    batch = _batches(scale, RESHARDING)[0]
    outcome = run([batch])[batch]
    result = outcome.result
    claims = [
        msgspec.structs.replace(
            _claim(
                "the pool is filled before the first transition: its peak",
                "full",
                Spread.of([result.host_peak]),
                "{:.2f}",
                0.9,
            ),
            figure="6",
        ),
        msgspec.structs.replace(
            _claim("the devices are full as decoding begins: peak", "full", Spread.of([result.kv_peak]), "{:.2f}", 0.9),
            figure="6",
        ),
    ]
    curves = [
        Curve(
            label=f"{tier} KV", xs=tuple(time for time, _ in series), ys=tuple(share for _, share in series), style="-"
        )
        for tier, series in result.occupancies.items()
    ]
    curves.append(_phases(outcome))
    panel = Panel(title=batch.setting.name, x="time (s)", y="share of blocks in use", curves=tuple(curves))
    rows = [
        {"begin": begin, "end": end, "phase": ("prefill", "decode")[layout]} for begin, end, layout in outcome.phases
    ]
    columns = [Column("phase", "phase"), Column("from s", "begin", ",.1f"), Column("to s", "end", ",.1f")]
    return Finding(claims, Chart(title="Seesaw, figure 6: both tiers of the KV cache", panels=(panel,)), rows, columns)


def _phases(outcome: Outcome) -> Curve:
    """A step curve: 0 in prefill, 1 in decode."""
    points = [(time, float(layout)) for begin, end, layout in outcome.phases for time in (begin, end)]
    return Curve(
        label="0: prefill, 1: decode",
        xs=tuple(time for time, _ in points),
        ys=tuple(layout for _, layout in points),
        style="k:",
    )
