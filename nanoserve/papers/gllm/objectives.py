"""gLLM, section 4.4: how many requests keep to limits of TTFT and TPOT (figure 14)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import Case, Outcome
from nanoserve.papers.charts import Chart, Panel
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Outcomes, Run, Scale
from nanoserve.papers.gllm.serving import LLAMA_AZURE, all_cases, curve, lone_request_limits, lowest, sweep_of
from nanoserve.papers.gllm.systems import GLLM, VLLM
from nanoserve.papers.tuning import spread

_GOAL = 0.8


def slo_attainment(scale: Scale, run: Run) -> Finding:
    """Figure 14: the share of requests within limits of TTFT and TPOT, 100B on four nodes."""
    setting = LLAMA_AZURE
    sweep = sweep_of(setting, (VLLM, GLLM), scale)
    outcomes = run(all_cases(sweep))
    seeds = range(len(scale.seeds))
    covered = {name: [_coverage(rates, seed, outcomes) for seed in seeds] for name, rates in sweep.items()}
    sustained = {name: [_sustained(rates, seed, outcomes) for seed in seeds] for name, rates in sweep.items()}
    limits = lone_request_limits(lowest(sweep, GLLM)[0])
    assumed = f"limits are assumed: TTFT {(limits.ttft or 0) / 1e3:.1f} s, TPOT {limits.tpot or 0:.0f} ms"
    claims = [
        Claim(
            figure="14",
            says=f"{what}, over vLLM's",
            paper=paper,
            ours=Spread.of(mine / theirs for mine, theirs in zip(values["gLLM"], values["vLLM"], strict=True)),
            form="{:.2f}x",
            at_least=low,
            assumption=assumed,
        )
        for what, values, paper, low in (
            ("SLO attainment, area under the curve", covered, "1.64x", 1.3),
            (f"rate at {_GOAL:.0%} attainment", sustained, "1.79x", 1.3),
        )
    ]
    least = [spread(lowest(sweep, system), outcomes, attainment).mean for system in (GLLM, VLLM)]
    claims.append(
        Claim(
            figure="14",
            says="SLO attainment at the lowest rate, minus vLLM's",
            paper="slightly below 0",
            ours=Spread.of([least[0] - least[1]]),
            form="{:.1f} points",
            at_most=0,
            assumption=assumed + "; needs a TTFT limit near what throttled prompts take",
        )
    )
    curves = tuple(curve(name, rates, outcomes, attainment) for name, rates in sweep.items())
    panel = Panel(title=setting.title, x="request rate, req/s", y="SLO attainment, %", curves=curves, marks=(80.0,))
    rows = [
        {"system": name, "rate": rate, "attainment": spread(cases, outcomes, attainment).mean}
        for name, rates in sweep.items()
        for rate, cases in rates.items()
    ]
    columns = [Column("system", "system"), Column("req/s", "rate", "g"), Column("attainment %", "attainment", ".0f")]
    return Finding(claims, Chart(title="gLLM, figure 14: four nodes with A800", panels=(panel,)), rows, columns)


def attainment(outcome: Outcome) -> float:
    """Per cent of the requests within the limits."""
    assert outcome.result.slo_attainment is not None, "limits were given"
    return 100 * outcome.result.slo_attainment


def _coverage(rates: Mapping[float, Sequence[Case]], seed: int, outcomes: Outcomes) -> float:
    """The area under attainment over the rate."""
    points = [(rate, attainment(outcomes[cases[seed]])) for rate, cases in sorted(rates.items())]
    pairs = pairwise(points)
    return sum((right - left) * (low + high) / 2 for (left, low), (right, high) in pairs)


def _sustained(rates: Mapping[float, Sequence[Case]], seed: int, outcomes: Outcomes) -> float:
    """The rate at which attainment falls below the goal, on a straight line between two rates."""
    before = (0.0, 100.0)
    for rate, cases in sorted(rates.items()):
        share = attainment(outcomes[cases[seed]])
        if share < 100 * _GOAL:
            return before[0] + (rate - before[0]) * (before[1] - 100 * _GOAL) / (before[1] - share)
        before = (rate, share)
    return before[0]
