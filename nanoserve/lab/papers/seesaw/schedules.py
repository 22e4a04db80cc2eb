"""Seesaw's figures 2 and 6: three ways to schedule changes of the layout, and both tiers of the KV
cache over time.

With all of the paper's host memory, all prompts of its batches fit there and the layout changes
once. Here the pool is smaller, so that it fills and empties several times: as it would with more
requests.
"""

from operator import attrgetter

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.costs.hardware import GIBI
from nanoserve.lab.charts import Chart, ChartCurve, Panel, panel
from nanoserve.lab.papers.cases import FREQUENT, RARE, Case, Metric, Outcome, Runs, over_seeds
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.seesaw.search import seconds
from nanoserve.lab.papers.seesaw.settings import A10, RESHARDING, closed_batch
from nanoserve.layout import ParallelLayout

# an eighth of the paper's; still 1.7 times what the devices hold beside the weights
_POOL_BYTES_PER_DEVICE = 10 * GIBI
_POLICIES = (RESHARDING.policy, FREQUENT, RARE)


def _batches(scale: Scale, policy: str) -> list[Case]:
    case = closed_batch(
        "codellama-34b", A10, 4, "arxiv", scale.pick(250, 1000), host_bytes=_POOL_BYTES_PER_DEVICE
    )
    layouts = (ParallelLayout(pipeline_parallel=4), ParallelLayout(tensor_parallel=4))
    return over_seeds(
        replace(case, layouts=layouts, system=replace(RESHARDING, policy=policy)), scale.seeds
    )


SCHEDULE_COLUMNS = columns(
    ("", "policy"),
    (",.0f", "seconds", "transitions"),
    (".1f", ("% of the time in them", "share"), ("answers of a decode step", "decodes")),
)


def three_schedules(scale: Scale, run: Run) -> Finding:
    """Figure 2: three ways to schedule transitions."""
    runs = Runs(run, {policy: _batches(scale, policy) for policy in _POLICIES})
    seesaw = RESHARDING.policy
    ours = {
        "2 transitions": runs.spread(seesaw, _transitions),
        **{f"2 share {policy}": runs.spread(policy, _share) for policy in _POLICIES},
        "2 answers": runs.ratio(seesaw, RARE, attrgetter("decodes")),
        **{
            f"2 throughput {policy}": runs.ratio(policy, seesaw, seconds)
            for policy in (FREQUENT, RARE)
        },
    }
    metrics: dict[str, Metric] = {
        "seconds": seconds,
        "transitions": _transitions,
        "share": _share,
        "decodes": attrgetter("decodes"),
    }
    titles = {
        FREQUENT: f"(a) {FREQUENT}",
        RARE: f"(b) {RARE}",
        seesaw: "(c) tiered, transition-minimizing",
    }
    panels = [_schedule(title, runs.outcomes(policy)[0]) for policy, title in titles.items()]
    return Finding(
        claims("seesaw", ours),
        Chart("Seesaw, figure 2: 34B on 4 A10, P4->T4, a pool of 40 GiB", panels, columns=3),
        [{"policy": policy, **runs.means(policy, metrics)} for policy in _POLICIES],
    )


_transitions = attrgetter("result.transitions")


def _share(one: Outcome) -> float:
    """Percent of the time that transitions take, waiting for the pipeline to empty not counted."""
    return 100 * one.breakdown.transition / seconds(one)


def _schedule(title: str, one: Outcome) -> Panel:
    """Sequences of each step over time, as the figure draws them."""
    times = [time for time, _, _, _ in one.result.tokens_series]
    answers = [decodes for _, _, decodes, _ in one.result.tokens_series]
    return panel(
        f"{title}: {seconds(one):,.0f} s",
        "time (s)",
        "answers of a step",
        times,
        {"": answers},
        styles="-",
    )


TIER_COLUMNS = columns(("", "phase"), (",.1f", ("from s", "begin"), ("to s", "end")))


def tiers(scale: Scale, run: Run) -> Finding:
    """Figure 6: occupancy of both tiers over time, with the phases."""
    case = _batches(scale, RESHARDING.policy)[0]
    outcome: Outcome = run([case])[case]
    result = outcome.result
    ours = {"6 pool": result.host_peak, "6 devices": result.kv_peak}
    curves = [
        ChartCurve(
            f"{tier} KV", [time for time, _ in series], [share for _, share in series], style="-"
        )
        for tier, series in result.occupancies.items()
    ]
    times, layouts = [], []
    for begin, end, layout in outcome.phases:
        times += [begin, end]
        layouts += [float(layout)] * 2
    curves.append(ChartCurve("0: prefill, 1: decode", times, layouts, style="k:"))
    title = (
        f"{case.model} on {case.layouts[0].devices} of {case.machine}, {case.requests} of "
        f"{case.lengths}"
    )
    both = Panel(title=title, x="time (s)", y="share of blocks in use", curves=curves)
    rows = [
        {"begin": begin, "end": end, "phase": ("prefill", "decode")[layout]}
        for begin, end, layout in outcome.phases
    ]
    return Finding(
        claims("seesaw", ours), Chart("Seesaw, figure 6: both tiers of the KV cache", [both]), rows
    )
