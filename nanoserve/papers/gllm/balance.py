"""gLLM, sections 1 and 2.4: uneven micro-batches and bubbles (figures 1, 4), and the cap that hides them."""

from statistics import mean, pstdev

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import Case, Outcome
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.gllm.systems import (
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
from nanoserve.papers.observers import StepSample
from nanoserve.papers.tuning import ratio, spread
from nanoserve.simulator.named_lengths import named_lengths

_CAPS = (256, 1024, 4096)


def token_counts(scale: Scale, run: Run) -> Finding:
    """Figure 1: tokens of consecutive micro-batches, under Sarathi-Serve's budget of 2048 and under throttling."""
    throttled, coupled = deep_backlog(scale, GLLM), deep_backlog(scale, WITH_CK)
    outcomes = run(throttled + coupled)
    variation = ratio(coupled, throttled, outcomes, lambda one: one.steady.variation)
    below = Spread.of(
        bubbles(outcomes[mine]) - bubbles(outcomes[theirs]) for mine, theirs in zip(coupled, throttled, strict=True)
    )
    claims = [
        Claim(
            figure="1",
            says="tokens of a micro-batch vary more (deviation over mean), Sarathi-Serve over throttling",
            paper="substantially",
            ours=variation,
            form="{:.1f}x",
            at_least=2,
            assumption="memory full of running answers: prompts can enter only in gusts",
        ),
        Claim(
            figure="1, 4",
            says="bubbles of Token Throttling",
            paper="few",
            ours=spread(throttled, outcomes, bubbles),
            form="{:.1f} %",
            at_most=12,
            assumption="stages prepare inputs beside computing (section 3.3)",
        ),
        Claim(
            figure="1, 4",
            says="bubbles of Sarathi-Serve in the same runtime, above those",
            paper="severe",
            ours=below,
            form="{:.1f} points",
            at_least=20,
            assumption="a deep backlog and a budget of 2048: with 512 there are none (figure 10)",
        ),
    ]
    rows = [
        {"system": system, **_balance(outcomes[cases[0]])}
        for system, cases in (("gLLM w/ CK", coupled), ("gLLM", throttled))
    ]
    panels = [
        _counts(name, outcomes[cases[0]].log) for name, cases in (("Sarathi-Serve", coupled), ("gLLM", throttled))
    ]
    chart = Chart(
        title="gLLM, figure 1: scheduled tokens of each micro-batch (dotted: the budget)",
        panels=tuple(panels),
        columns=2,
    )
    columns = [
        Column("system, first seed", "system"),
        Column("tokens of a step", "tokens", ",.0f"),
        Column("of prompts", "prefill", ",.0f"),
        Column("decodes", "decodes", ",.0f"),
        Column("variation", "variation", ".2f"),
        Column("bubbles", "bubbles", ".1f"),
        Column("tok/s", "throughput", ",.0f"),
    ]
    return Finding(claims, chart, rows, columns)


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


def _counts(title: str, log: list[StepSample]) -> Panel:
    steps = tuple(float(number) for number in range(len(log)))
    prefill = Curve(label="prefill", xs=steps, ys=tuple(float(one.prefill_tokens) for one in log), style="-")
    decode = Curve(label="decode", xs=steps, ys=tuple(float(one.decodes) for one in log), style="-")
    return Panel(title=title, x="iteration", y="batched tokens", curves=(prefill, decode), marks=(2048.0,))


# ------------------------------------------------------------------------------------------------------- figure 4

_BURST_RATE, _BURST_SECONDS = 10.0, 60.0
_ALL_STEPS = 100_000
_BUCKET = 2.0
_FEW = 0.5
"""The second phase ends when fewer than this share of its first decodes are left: then there is little to do at all."""


def utilization(scale: Scale, run: Run) -> Finding:
    """Figure 4: stages busy and tokens batched over time, while requests come and after the last prompt."""
    cases = at_rate(VLLM, _BURST_RATE, _BURST_SECONDS, scale.seeds)
    cases = [_logged(case) for case in cases]
    outcomes = run(cases)
    phases = [_phases(outcomes[case].log) for case in cases]
    first, second = zip(*phases, strict=True)
    claims = [
        Claim(
            figure="4",
            says="tokens of a micro-batch vary (deviation over mean), while prompts come over after the last",
            paper="high, then stable",
            ours=Spread.of(_variation(one) / _variation(two) for one, two in phases),
            form="{:.1f}x",
            at_least=1,
            assumption="prompts as uneven as ShareGPT's",
        ),
        Claim(
            figure="4",
            says="first phase: stages busy",
            paper="under-utilized",
            ours=Spread.of(_busy(phase) for phase in first),
            form="{:.0f} %",
            at_most=85,
            assumption="17 % of a coupled runtime's time prepares inputs (section 3.4)",
        ),
        Claim(
            figure="4",
            says="second phase, decodes only: stages busy",
            paper="steadier, still suboptimal",
            ours=Spread.of(_busy(phase) for phase in second),
            form="{:.0f} %",
            at_most=85,
            assumption="decodes stay as uneven over micro-batches as prompts left them",
        ),
    ]
    log = outcomes[cases[0]].log
    return Finding(claims, _utilization_chart(log))


def _logged(case: Case) -> Case:
    from msgspec.structs import replace

    return replace(case, steady=(0.0, 1.0), logged_steps=_ALL_STEPS)


def _phases(log: list[StepSample]) -> tuple[list[StepSample], list[StepSample]]:
    """Steps up to the last prompt, and those behind it while decodes are many."""
    last = max(number for number, one in enumerate(log) if one.prefill_tokens) + 1
    after = log[last:]
    most = max(one.decodes for one in after)
    count = next((number for number, one in enumerate(after) if one.decodes < _FEW * most and number > 8), len(after))
    return log[:last], after[:count]


def _variation(phase: list[StepSample]) -> float:
    tokens = [one.prefill_tokens + one.decodes for one in phase]
    return pstdev(tokens) / mean(tokens)


def _busy(phase: list[StepSample]) -> float:
    """Per cent of the time from the first to the last step, mean over stages."""
    stages = range(len(phase[0].passages))
    spans = [
        sum(end - start for start, end in (one.passages[stage] for one in phase[:-1]))
        / (phase[-1].passages[stage][0] - phase[0].passages[stage][0])
        for stage in stages
    ]
    return 100 * mean(spans)


def _utilization_chart(log: list[StepSample]) -> Chart:
    end = log[-1].time
    buckets = [0.0] * (int(end / _BUCKET) + 1)
    stages = len(log[0].passages)
    for one in log:
        for start, stop in one.passages:
            for place in range(int(start / _BUCKET), min(int(stop / _BUCKET) + 1, len(buckets))):
                within = min(stop, (place + 1) * _BUCKET) - max(start, place * _BUCKET)
                buckets[place] += 100 * within / _BUCKET / stages
    times = tuple(_BUCKET * place for place in range(len(buckets)))
    moments = tuple(one.time for one in log)
    prefill = Curve(label="prefill", xs=moments, ys=tuple(float(one.prefill_tokens) for one in log), style="-")
    decode = Curve(label="decode", xs=moments, ys=tuple(float(one.decodes) for one in log), style="-")
    panels = (
        Panel(
            title="(a) stages busy",
            x="time, s",
            y="GPU utilization, %",
            curves=(Curve(label="", xs=times, ys=tuple(buckets), style="-"),),
        ),
        Panel(title="(b) micro-batches", x="time, s", y="batched tokens", curves=(prefill, decode)),
    )
    return Chart(title="gLLM, figure 4: Sarathi-Serve in a coupled runtime, 32B on 4 x L20", panels=panels, columns=2)


# ---------------------------------------------------------------------------------------------- lengths, and the cap


def lengths(scale: Scale, run: Run) -> Finding:
    """Figure 11: how long requests are."""
    count = scale.pick(5_000, 20_000)
    drawn = {}
    for name in (SHAREGPT, AZURE):
        shapes = named_lengths(name, seed=0)
        drawn[name] = [next(shapes) for _ in range(count)]
    inputs = {name: [shape.input_tokens for shape in shapes] for name, shapes in drawn.items()}
    outputs = {name: [shape.output_tokens for shape in shapes] for name, shapes in drawn.items()}
    claims = [
        Claim(
            figure="11",
            says=f"mean {what} of Azure over ShareGPT",
            paper=f"{stated}x",
            ours=Spread.of([mean(sizes[AZURE]) / mean(sizes[SHAREGPT])]),
            form="{:.2f}x",
            at_least=stated * 0.9,
            at_most=stated * 1.1,
            assumption="put in: ShareGPT's means are Azure's over what the paper states, its tail is assumed lognormal",
        )
        for what, sizes, stated in (("input", inputs, 5.21), ("output", outputs, 1.66))
    ]
    panels = tuple(
        Panel(
            title=what,
            x="tokens",
            y="share of requests below, %",
            curves=tuple(_cumulative(name, sizes[name]) for name in sizes),
            log_x=True,
        )
        for what, sizes in (("input", inputs), ("output", outputs))
    )
    return Finding(claims, Chart(title="gLLM, figure 11: lengths of requests", panels=panels, columns=2))


def _cumulative(name: str, sizes: list[int]) -> Curve:
    ordered = sorted(sizes)
    shares = tuple(float(share) for share in range(101))
    places = [min(len(ordered) - 1, round(share / 100 * (len(ordered) - 1))) for share in shares]
    return Curve(label=name, xs=tuple(float(ordered[place]) for place in places), ys=shares, style="-")


def caps(scale: Scale, run: Run) -> Finding:
    """No figure of the paper: the deep backlog under a cap on running sequences, which the paper does not state."""
    systems = (GLLM, WITH_CK, VLLM)
    cases = {
        (system.label, cap): deep_backlog(scale.first_seed, system, max_num_seqs=cap)
        for system in systems
        for cap in _CAPS
    }
    outcomes = run(case for several in cases.values() for case in several)
    gains = {cap: ratio(cases[GLLM.label, cap], cases[WITH_CK.label, cap], outcomes, throughput) for cap in _CAPS}
    claims = [
        Claim(
            figure="cap",
            says=f"throughput over Sarathi-Serve in the same runtime, at most {cap} sequences running",
            paper="not stated",
            ours=gains[cap],
            form="{:.2f}x",
            at_least=low,
            at_most=high,
            assumption=why,
        )
        for cap, low, high, why in (
            (256, 0.9, 1.1, "vLLM's default cap leaves both with a fifth of the memory in use: nothing to balance"),
            (1024, 1.1, None, "the cap is what memory holds, about"),
            (4096, 1.3, None, "no cap in effect"),
        )
    ]
    unlike = ratio(cases[GLLM.label, 4096], cases[VLLM.label, 256], outcomes, throughput)
    claims.append(
        Claim(
            figure="cap",
            says="throughput without a cap over vLLM with its default of 256",
            paper="1.29x to 2.50x",
            ours=unlike,
            form="{:.2f}x",
            at_least=1.29,
            assumption="unlike caps compare the caps, not the policies",
        )
    )
    curves = tuple(
        Curve(
            label=system.label,
            xs=tuple(map(str, _CAPS)),
            ys=tuple(spread(cases[system.label, cap], outcomes, throughput).mean for cap in _CAPS),
        )
        for system in systems
    )
    panel = Panel(title="deep backlog", x="sequences running at most", y="tokens/s", curves=curves, kind="bar")
    rows = [{"system": label, "cap": cap, **_balance(outcomes[several[0]])} for (label, cap), several in cases.items()]
    columns = [
        Column("system", "system"),
        Column("cap", "cap", ",d"),
        Column("tok/s", "throughput", ",.0f"),
        Column("bubbles", "bubbles", ".1f"),
        Column("tokens of a step", "tokens", ",.0f"),
        Column("variation", "variation", ".2f"),
    ]
    return Finding(claims, Chart(title="The cap on running sequences", panels=(panel,)), rows, columns)
