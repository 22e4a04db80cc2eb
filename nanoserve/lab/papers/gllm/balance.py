"""gLLM, sections 1 and 2.4: uneven micro-batches and bubbles (figures 1, 4), and the cap that hides
them."""

from collections.abc import Sequence
from itertools import islice, product
from statistics import mean, pstdev

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, ChartCurve, Panel, panel
from nanoserve.lab.papers.cases import Outcome, Runs
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.gllm.systems import (
    AZURE,
    GLLM,
    SHAREGPT,
    VLLM,
    WITH_CK,
    at_rate,
    bubbles,
    deep_backlog,
    throughput,
)
from nanoserve.lab.simulator.workload import named_lengths
from nanoserve.lab.step_window import WindowStep
from nanoserve.record.metrics import Spread

_CAPS = (256, 1024, 4096)


TOKEN_COLUMNS = columns(
    ("", ("system, first seed", "system")),
    (",.0f", ("tokens of a step", "tokens"), ("of prompts", "prefill"), "decodes"),
    (".2f", "variation"),
    (".1f", "bubbles"),
    (",.0f", ("tok/s", "throughput")),
)


def token_counts(scale: Scale, run: Run) -> Finding:
    """Figure 1: tokens of consecutive micro-batches, under Sarathi-Serve's budget of 2048 and under
    throttling."""
    runs = Runs(run, {system.label: deep_backlog(scale, system) for system in (GLLM, WITH_CK)})
    few, severe = runs.values(GLLM.label, bubbles), runs.values(WITH_CK.label, bubbles)
    ours = {
        "1 variation": runs.ratio(WITH_CK.label, GLLM.label, lambda one: one.steady.variation),
        "1 few bubbles": Spread.of(few),
        "1 severe bubbles": Spread.of(
            theirs - mine for mine, theirs in zip(few, severe, strict=True)
        ),
    }
    firsts = {label: runs.outcomes(label)[0] for label in (WITH_CK.label, GLLM.label)}
    panels = [
        _batched_tokens(title, "iteration", range(len(one.log)), one.log, marks=(2048.0,))
        for title, one in zip(("Sarathi-Serve", "gLLM"), firsts.values(), strict=True)
    ]
    return Finding(
        claims("gllm", ours),
        Chart(
            "gLLM, figure 1: scheduled tokens of each micro-batch (dotted: the budget)",
            panels,
            columns=2,
        ),
        [{"system": label, **_balance(one)} for label, one in firsts.items()],
    )


def _balance(outcome: Outcome) -> dict[str, float]:
    steady = outcome.steady
    return {
        "tokens": steady.step_tokens,
        "prefill": steady.prefill_tokens,
        "decodes": steady.decodes,
        "variation": steady.variation,
        "bubbles": bubbles(outcome),
        "throughput": throughput(outcome),
    }


def _batched_tokens(
    title: str,
    x: str,
    places: Sequence[float],
    log: Sequence[WindowStep],
    marks: tuple[float, ...] = (),
) -> Panel:
    heights = {
        "prefill": [float(one.prompt_tokens) for one in log],
        "decode": [float(one.decodes) for one in log],
    }
    return panel(
        title, x, "batched tokens", list(map(float, places)), heights, styles="-", marks=marks
    )


_BURST_RATE, _BURST_SECONDS = 10.0, 60.0
_ALL_STEPS = 100_000
_BUCKET = 2.0
_FEW = 0.5
"""The second phase ends when fewer than this share of its first decodes are left: then there is
little to do at all."""


def utilization(scale: Scale, run: Run) -> Finding:
    """Figure 4: stages busy and tokens batched over time, while requests arrive and after the last
    prompt."""
    cases = at_rate(VLLM, _BURST_RATE, _BURST_SECONDS, scale.seeds)
    runs = Runs(
        run, {"": [replace(case, steady=(0.0, 1.0), logged_steps=_ALL_STEPS) for case in cases]}
    )
    logs = [one.log for one in runs.outcomes("")]
    phases = [_phases(log) for log in logs]
    ours = {
        "4 variation": Spread.of(
            _variation(first) / _variation(second) for first, second in phases
        ),
        "4 first phase": Spread.of(_busy(first) for first, _ in phases),
        "4 second phase": Spread.of(_busy(second) for _, second in phases),
    }
    log = logs[0]
    buckets = _busy_over_time(log)
    times = [_BUCKET * place for place in range(len(buckets))]
    panels = (
        panel("(a) stages busy", "time, s", "GPU utilization, %", times, {"": buckets}, styles="-"),
        _batched_tokens("(b) micro-batches", "time, s", [one.time for one in log], log),
    )
    chart = Chart(
        "gLLM, figure 4: Sarathi-Serve in a coupled runtime, 32B on 4 x L20", panels, columns=2
    )
    return Finding(claims("gllm", ours), chart)


def _phases(log: list[WindowStep]) -> tuple[list[WindowStep], list[WindowStep]]:
    """Steps up to the last prompt, and those after it while decodes are many."""
    last = max(number for number, one in enumerate(log) if one.prompt_tokens) + 1
    after = log[last:]
    most = max(one.decodes for one in after)
    count = next(
        (number for number, one in enumerate(after) if one.decodes < _FEW * most and number > 8),
        len(after),
    )
    return log[:last], after[:count]


def _variation(phase: list[WindowStep]) -> float:
    tokens = [one.prompt_tokens + one.decodes for one in phase]
    return pstdev(tokens) / mean(tokens)


def _busy(phase: list[WindowStep]) -> float:
    """Per cent of the time from the first to the last step, mean over stages."""
    stages = range(len(phase[0].spans))
    spans = [
        sum(end - start for start, end in (one.spans[stage] for one in phase[:-1]))
        / (phase[-1].spans[stage][0] - phase[0].spans[stage][0])
        for stage in stages
    ]
    return 100 * mean(spans)


def _busy_over_time(log: list[WindowStep]) -> list[float]:
    """Per cent of each bucket of time in which stages compute, mean over stages."""
    buckets = [0.0] * (int(log[-1].time / _BUCKET) + 1)
    stages = len(log[0].spans)
    for one in log:
        for start, stop in one.spans:
            for place in range(int(start / _BUCKET), min(int(stop / _BUCKET) + 1, len(buckets))):
                within = min(stop, (place + 1) * _BUCKET) - max(start, place * _BUCKET)
                buckets[place] += 100 * within / _BUCKET / stages
    return buckets


def lengths(scale: Scale, run: Run) -> Finding:
    """Figure 11: how long requests are."""
    count = scale.pick(5_000, 20_000)
    drawn = {name: list(islice(named_lengths(name, seed=0), count)) for name in (SHAREGPT, AZURE)}
    over_sharegpt, panels = {}, []
    for what in ("input", "output"):
        sizes = {
            name: [getattr(shape, f"{what}_tokens") for shape in shapes]
            for name, shapes in drawn.items()
        }
        over_sharegpt[f"11 {what}"] = mean(sizes[AZURE]) / mean(sizes[SHAREGPT])
        curves = [_cumulative(name, tokens) for name, tokens in sizes.items()]
        panels.append(
            Panel(title=what, x="tokens", y="share of requests below, %", curves=curves, log_x=True)
        )
    chart = Chart("gLLM, figure 11: lengths of requests", panels, columns=2)
    return Finding(claims("gllm", over_sharegpt), chart)


def _cumulative(name: str, sizes: list[int]) -> ChartCurve:
    ordered = sorted(sizes)
    shares = [float(share) for share in range(101)]
    places = [min(len(ordered) - 1, round(share / 100 * (len(ordered) - 1))) for share in shares]
    return ChartCurve(name, [float(ordered[place]) for place in places], shares, style="-")


CAP_COLUMNS = columns(
    ("", "system"),
    (",d", "cap"),
    (",.0f", ("tok/s", "throughput")),
    (".1f", "bubbles"),
    (",.0f", ("tokens of a step", "tokens")),
    (".2f", "variation"),
)


def caps(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: the deep backlog under a cap on running sequences, which the paper
    does not state."""
    systems = (GLLM, WITH_CK, VLLM)
    jobs = {  # other figures have the runs of the highest cap too, and read their latencies
        (one.label, cap): deep_backlog(
            scale.first_seed, one, max_num_seqs=cap, ends_steady=cap < max(_CAPS)
        )
        for one, cap in product(systems, _CAPS)
    }
    runs = Runs(run, jobs)
    ours = {
        f"cap {cap}": runs.ratio((GLLM.label, cap), (WITH_CK.label, cap), throughput)
        for cap in _CAPS
    }
    ours["cap unlike"] = runs.ratio((GLLM.label, 4096), (VLLM.label, 256), throughput)
    heights = {
        one.label: [runs.mean((one.label, cap), throughput) for cap in _CAPS] for one in systems
    }
    bars = panel(
        "deep backlog",
        "sequences running at most",
        "tokens/s",
        list(map(str, _CAPS)),
        heights,
        kind="bar",
    )
    return Finding(
        claims("gllm", ours),
        Chart("The cap on running sequences", [bars]),
        [
            {"system": label, "cap": cap, **_balance(runs.outcomes((label, cap))[0])}
            for label, cap in runs.cases
        ],
    )
