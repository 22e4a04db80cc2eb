"""Seesaw's figures 2 and 6: three ways to schedule changes of the layout, and both tiers of the KV cache over time.

With all of the paper's host memory, all prompts of its batches fit there and the layout changes once. Here the pool is
smaller, so that it fills and empties several times: as it would with more requests.
"""

from nanoserve.benchmarks.tables import Column
from nanoserve.costs import ParallelLayout
from nanoserve.costs.hardware import GIBI
from nanoserve.papers.cases import Runs
from nanoserve.papers.charts import Chart, ChartCurve, Panel, panel
from nanoserve.papers.claims import ClaimRow, claims
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.seesaw.runs import FREQUENT, RARE, BatchOutcome, ClosedBatch
from nanoserve.papers.seesaw.search import over_seeds
from nanoserve.papers.seesaw.settings import RESHARDING, LayoutChoice, OfflineBatch
from nanoserve.papers.seesaw.throughput import A10

_POOL_BYTES_PER_DEVICE = 10 * GIBI
"""An eighth of the paper's; still 1.7 times what the devices hold beside the weights."""
_POOL = "10 GiB of host memory per GPU instead of 80; weights come at 75 % of PCIe 4.0 x8"


def _setting(scale: Scale) -> OfflineBatch:
    return OfflineBatch(
        model="codellama-34b",
        machine=A10,
        devices=4,
        lengths="arxiv",
        requests=scale.pick(250, 1000),
        host_bytes_per_device=_POOL_BYTES_PER_DEVICE,
        seed=scale.seeds[0],
    )


def _batches(scale: Scale, policy: str) -> list[ClosedBatch]:
    choice = LayoutChoice(
        prefill=ParallelLayout(pipeline_parallel=4), decode=ParallelLayout(tensor_parallel=4), policy=policy
    )
    return over_seeds(_setting(scale), choice, scale.seeds)


# ---- figure 2 ---------------------------------------------------------------------------------------------------


def three_schedules(scale: Scale, run: Run) -> Finding:
    """Figure 2: three ways to schedule transitions."""
    runs = Runs(run, {policy: _batches(scale, policy) for policy in (RESHARDING, FREQUENT, RARE)})
    more_answers = runs.ratio(RESHARDING, RARE, _decodes)
    over_frequent, over_rare = (runs.ratio(other, RESHARDING, _seconds) for other in (FREQUENT, RARE))
    share, small = {policy: runs.spread(policy, _share) for policy in runs.jobs}, "at most 10.0 %"
    several = runs.spread(RESHARDING, _transitions)
    found: list[ClaimRow] = [
        ("transitions of Seesaw, with a small pool", "several", several, "at least 3", _POOL),
        ("time in transitions: Seesaw", "small", share[RESHARDING], small, _POOL),
        ("time in transitions: prefill-prioritizing", "large", share[FREQUENT], "at least 20.0 %", _POOL),
        ("time in transitions: decode-prioritizing", "small", share[RARE], small, _POOL),
        ("answers on the devices: Seesaw over decode-prioritizing", "more", more_answers, "at least 1.20x", _POOL),
        ("throughput over prefill-prioritizing", "more", over_frequent, "at least 1.00x", _POOL),
        ("throughput over decode-prioritizing", "more", over_rare, "at least 1.00x", _POOL),
    ]
    metrics = {"seconds": _seconds, "transitions": _transitions, "share": _share, "decodes": _decodes}
    panels = [
        _schedule(title, runs.outcomes(policy)[0])
        for title, policy in (
            ("(a) prefill-prioritizing", FREQUENT),
            ("(b) decode-prioritizing", RARE),
            ("(c) tiered, transition-minimizing", RESHARDING),
        )
    ]
    return Finding(
        claims("2", found),
        Chart("Seesaw, figure 2: 34B on 4 A10, P4->T4, a pool of 40 GiB", panels, columns=3),
        [{"policy": policy, **runs.means(policy, metrics)} for policy in runs.jobs],
        [
            Column("policy", "policy"),
            Column("seconds", "seconds", ",.0f"),
            Column("transitions", "transitions", ",.0f"),
            Column("% of the time in them", "share", ".1f"),
            Column("answers of a decode step", "decodes", ".1f"),
        ],
    )


def _seconds(one: BatchOutcome) -> float:
    return one.seconds


def _transitions(one: BatchOutcome) -> float:
    return one.result.transitions


def _share(one: BatchOutcome) -> float:
    """Percent of the time that transitions take, waiting for the pipeline to empty not counted."""
    return 100 * one.breakdown.transition / one.seconds


def _decodes(one: BatchOutcome) -> float:
    """Answers of a step without prompts, on average over time."""
    return one.decodes


def _schedule(title: str, one: BatchOutcome) -> Panel:
    """Sequences of each step over time, as the figure draws them."""
    times, _, answers, *_ = zip(*one.result.tokens_series, strict=True)
    return panel(f"{title}: {one.seconds:,.0f} s", "time (s)", "answers of a step", times, {"": answers}, styles="-")


# ---- figure 6 ---------------------------------------------------------------------------------------------------


def tiers(scale: Scale, run: Run) -> Finding:
    """Figure 6: occupancy of both tiers over time, with the phases."""
    batch = _batches(scale, RESHARDING)[0]
    outcome = run([batch])[batch]
    result = outcome.result
    found: list[ClaimRow] = [
        ("the pool is filled before the first transition: its peak", "full", result.host_peak, "at least 0.90", _POOL),
        ("the devices are full as decoding begins: peak", "full", result.kv_peak, "at least 0.90", _POOL),
    ]
    curves = [
        ChartCurve(f"{tier} KV", [time for time, _ in series], [share for _, share in series], style="-")
        for tier, series in result.occupancies.items()
    ]
    phases = [(time, float(layout)) for begin, end, layout in outcome.phases for time in (begin, end)]
    times, layouts = zip(*phases, strict=True)
    curves.append(ChartCurve("0: prefill, 1: decode", times, layouts, style="k:"))
    both = Panel(title=batch.setting.name, x="time (s)", y="share of blocks in use", curves=curves)
    rows = [
        {"begin": begin, "end": end, "phase": ("prefill", "decode")[layout]} for begin, end, layout in outcome.phases
    ]
    columns = [Column("phase", "phase"), Column("from s", "begin", ",.1f"), Column("to s", "end", ",.1f")]
    return Finding(claims("6", found), Chart("Seesaw, figure 6: both tiers of the KV cache", [both]), rows, columns)
