"""Ours, after gLLM: AdaptiveThrottling over TokenThrottling, on a list fixed beforehand and reported whole.

Loads are relative to what TokenThrottling serves at most in the same setting, so a first round of simulations finds
that out. Figure "list" is the comparison; figure "parts" switches the two ideas of the policy off, one at a time,
where memory is short.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from msgspec.structs import replace

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import Case, Outcome, System
from nanoserve.papers.claims import Claim, Spread
from nanoserve.papers.framework import Finding, Outcomes, Paper, PaperFigure, Run, Scale
from nanoserve.papers.tuning import over_seeds, ratio, spread

THROTTLING = System(label="throttling", policy="throttling")
ADAPTIVE = System(label="adaptive", policy="adaptive")
VARIANTS = (
    ADAPTIVE,
    ADAPTIVE.with_("adaptive, steps not filled up", fill=0),
    ADAPTIVE.with_("adaptive, nothing reserved", most_reserved=0.0),
    ADAPTIVE.with_("adaptive, half may be reserved", most_reserved=0.5),
)


class Setting(NamedTuple):
    """One line of the list."""

    model: str
    machine: str
    devices: int
    lengths: str
    """What is served, where."""
    pool: float
    """Share of the KV blocks."""
    load: float
    """Arrivals over what throttling serves at most."""


SETTINGS = [
    Setting(model, machine, devices, lengths, pool, load)
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
    Setting("qwen2.5-32b", "gllm-l20", 4, "azure-conv", 0.125, 1.2),
    Setting("qwen2.5-32b", "gllm-l20", 4, "azure-conv", 0.0625, 1.2),
    Setting("qwen2.5-32b", "gllm-l20", 4, "256+1024", 0.0625, 1.2),  # answers that are long beside the pool, and equal
]

_REQUESTS, _REQUESTS_OF_FULL = 500, 2000
_SEED_OF_CAPACITY = 1000
"""The most that throttling serves is found with other requests than those that are compared."""

_ALIKE = 0.02
"""What counts as equal."""

Figure = Callable[[Outcome], float]


def _throughput(outcome: Outcome) -> float:
    return outcome.result.tokens_per_second


def _tpot(outcome: Outcome) -> float:
    assert outcome.result.tpot_ms is not None, "answers have more than one token"
    return outcome.result.tpot_ms.mean


def _ttft(outcome: Outcome) -> float:
    assert outcome.result.ttft_ms is not None, "there are requests"
    return outcome.result.ttft_ms.mean


def _preemptions(outcome: Outcome) -> float:
    return outcome.result.preemptions


class Comparison(NamedTuple):
    """The runs of a setting, one for each seed."""

    setting: Setting
    system: System
    cases: Sequence[Case]
    throttling: Sequence[Case]

    def row(self, outcomes: Outcomes) -> dict[str, object]:
        """The figures over those of throttling, and what was preempted, with the spread over seeds."""
        row: dict[str, object] = {**self.setting._asdict(), "policy": self.system.label}
        for name, figure in (("throughput", _throughput), ("tpot", _tpot), ("ttft", _ttft)):
            found = ratio(self.cases, self.throttling, outcomes, figure)
            row |= {name: found, f"{name}_text": found.text("{:.3f}")}
        for name, cases in (("preemptions", self.cases), ("throttling_preemptions", self.throttling)):
            found = spread(cases, outcomes, _preemptions)
            row |= {name: found, f"{name}_text": found.text("{:.0f}")}
        row["throttling_tokens_per_second"] = spread(self.throttling, outcomes, _throughput)
        row["throttling_tpot_ms"] = spread(self.throttling, outcomes, _tpot)
        return row


_COLUMNS = [
    Column("lengths", "lengths"),
    Column("pool", "pool", ".3g"),
    Column("load", "load", ".1f"),
    Column("throughput", "throughput_text"),
    Column("TPOT", "tpot_text"),
    Column("TTFT", "ttft_text"),
    Column("preempted", "preemptions_text"),
    Column("throttling's", "throttling_preemptions_text"),
]


def compare(
    settings: Iterable[Setting], systems: Sequence[System], requests: int, scale: Scale, run: Run
) -> tuple[list[Comparison], Outcomes]:
    """Every system over throttling in every setting: one round for the loads, one for the comparisons."""
    at_once = {setting: _all_at_once(setting, requests) for setting in settings}
    outcomes = run(at_once.values())
    comparisons = []
    for setting, case in at_once.items():
        rate = setting.load * _requests_per_second(outcomes[case])
        throttling = over_seeds(replace(case, rate=rate), scale.seeds)
        for system in systems:
            cases = [replace(one, system=system) for one in throttling]
            comparisons.append(Comparison(setting, system, cases, throttling))
    return comparisons, run(case for one in comparisons for case in (*one.throttling, *one.cases))


def _all_at_once(setting: Setting, requests: int) -> Case:
    return Case(
        system=THROTTLING,
        model=setting.model,
        machine=setting.machine,
        devices=setting.devices,
        lengths=setting.lengths,
        requests=requests,
        pool=setting.pool,
        seed=_SEED_OF_CAPACITY,
    )


def _requests_per_second(outcome: Outcome) -> float:
    """In the steady state, of requests of average length."""
    result = outcome.result
    return outcome.steady.tokens_per_second * result.requests / (result.input_tokens + result.output_tokens)


def _list(scale: Scale, run: Run) -> Finding:
    comparisons, outcomes = compare(SETTINGS, [ADAPTIVE], scale.pick(_REQUESTS, _REQUESTS_OF_FULL), scale, run)
    rows = [one.row(outcomes) for one in comparisons]
    return Finding(_claims(comparisons, outcomes), None, rows, [Column("model", "model"), *_COLUMNS])


def _parts(scale: Scale, run: Run) -> Finding:
    comparisons, outcomes = compare(
        SHORT_OF_MEMORY, VARIANTS, scale.pick(_REQUESTS // 2, _REQUESTS_OF_FULL), scale, run
    )
    rows = [one.row(outcomes) for one in comparisons]
    whole = [one for one in comparisons if one.system == ADAPTIVE]
    longest = whole[-1]
    claims = [
        Claim(
            figure="parts",
            says="throughput where memory is short, geometric mean",
            paper="higher",
            ours=_mean(_ratios(whole, outcomes, _throughput)),
            form="{:.3f}x",
            at_least=1.0,
            assumption="how many blocks throttling leaves idle beside what answers grow by",
        ),
        Claim(
            figure="parts",
            says="preemptions where answers are long and equal",
            paper="fewer",
            ours=ratio(longest.cases, longest.throttling, outcomes, _preemptions),
            form="{:.2f}x",
            at_most=1.0,
            assumption="the tenth of the pool that may be reserved: half of it preempts less and serves less",
        ),
    ]
    return Finding(claims, None, rows, [Column("policy", "policy"), *_COLUMNS])


def _claims(every: Sequence[Comparison], outcomes: Outcomes) -> list[Claim]:
    """The list in a few numbers. Nobody else has claimed them: the "paper" is what adaptive is meant for."""

    def claim(
        says: str, meant: str, ours: Spread, hangs_on: str, *bounds: float | None, form: str = "{:.3f}x"
    ) -> Claim:
        low, high = bounds
        return Claim(
            figure="list", says=says, paper=meant, ours=ours, form=form, at_least=low, at_most=high, assumption=hangs_on
        )

    short = [one for one in every if one.setting.pool < 1 and one.setting.load > 1]
    idle = "blocks above the expected growth are used, where throttling leaves 5 % idle"
    flat = "up to 128 tokens a step takes as long as with one: 16-bit products on these devices"
    known = "answers are as long as they were before"
    mean, worst = "geometric mean", "worst setting"
    throughput, tpot, ttft = (_ratios(every, outcomes, figure) for figure in (_throughput, _tpot, _ttft))
    more = [
        sum(_preemptions(outcomes[case]) - _preemptions(outcomes[base]) for case, base in zip(runs, bases, strict=True))
        for runs, bases in _by_seed(every)
    ]
    return [
        claim(f"throughput, {mean}", "not lower", _mean(throughput), idle, 1.0, None),
        claim(f"throughput, {worst}", "not lower", Spread.of(map(min, throughput)), idle, 1 - _ALIKE, None),
        claim(f"TPOT, {mean}", "not higher", _mean(tpot), flat, None, 1.0),
        claim(f"TPOT, {worst}", "not higher", Spread.of(map(max, tpot)), flat, None, 1 + _ALIKE),
        claim("preemptions, difference over all settings", "not more", Spread.of(more), known, None, 0, form="{:+.0f}"),
        claim(
            f"throughput at load 1.2 with the small pool, {mean}",
            "higher",
            _mean(_ratios(short, outcomes, _throughput)),
            idle,
            1.0,
            None,
        ),
        claim(f"TTFT, {mean}", "lower", _mean(ttft), flat, None, 1.0),
    ]


def _by_seed(comparisons: Sequence[Comparison]) -> list[tuple[list[Case], list[Case]]]:
    """For each seed the cases of all settings, and those of throttling."""
    cases = zip(*(one.cases for one in comparisons), strict=True)
    throttling = zip(*(one.throttling for one in comparisons), strict=True)
    return [(list(runs), list(bases)) for runs, bases in zip(cases, throttling, strict=True)]


def _ratios(comparisons: Sequence[Comparison], outcomes: Outcomes, figure: Figure) -> list[list[float]]:
    """For each seed, the ratio to throttling in each setting."""
    return [
        [figure(outcomes[case]) / figure(outcomes[base]) for case, base in zip(runs, bases, strict=True)]
        for runs, bases in _by_seed(comparisons)
    ]


def _mean(ratios: Iterable[Sequence[float]]) -> Spread:
    """The geometric mean of each seed's ratios."""
    return Spread.of(map(geometric_mean, ratios))


PAPER = Paper(
    title="adaptive over throttling (ours, after gLLM)",
    setting=(f"{_REQUESTS} requests a run, {_REQUESTS // 2} for the parts", f"{_REQUESTS_OF_FULL:,d} requests a run"),
    figures=[
        PaperFigure(number="list", title="adaptive over throttling", make=_list),
        PaperFigure(number="parts", title="where memory is short: the parts of adaptive, over throttling", make=_parts),
    ],
)
