"""Predictions for layouts and given requests: advice beside chosen layouts, and a choice where the
user leaves it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import DEFAULT_POLICY, POLICY_OF_TWO_LAYOUTS
from nanoserve.lab.simulator.planning import CacheLimits, Candidate, PlannedWork, find_candidates
from nanoserve.lab.simulator.workload import GLLMS_SHAREGPT, named_lengths
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape
from nanoserve.scheduler.policies import make_policy

_SAMPLED_REQUESTS, _SAMPLED_TOKENS = 200, 16_000
"""Most requests and answer tokens that are simulated: each candidate takes a few tenths of a
second."""
_TOP = 3
"""Layouts, and pairs of layouts, that are simulated."""
_WORTH_SAYING = 1.05
_USUAL_REQUESTS, _USUAL_LOAD = 120, 0.5
"""Requests, and their share of the best estimated throughput, for whoever does not say what will
come."""
_POLICIES_OF_STAGES = (DEFAULT_POLICY, "throttling", "adaptive")


@dataclass(frozen=True, slots=True)
class LayoutForecast:
    """Prediction for a layout, or a pair of layouts, under a policy."""

    layouts: tuple[ParallelLayout, ...]
    """One layout, or that of prompts and that of answers; both contain the data parallel degree."""
    policy: str
    tokens_per_second: float
    """Throughput of all devices; prompt and answer tokens both count."""
    latency: float
    """Mean seconds from arrival to last token."""
    parts: Mapping[str, float]
    """Seconds of a closed batch, or at a rate of one request, by what they go to."""

    @property
    def name(self) -> str:
        return "->".join(layout.name for layout in self.layouts)

    def shortfall(self, best: "LayoutForecast") -> str:
        """Where it loses most time against the best one, in words."""
        lost, part = max((seconds - best.parts[part], part) for part, seconds in self.parts.items())
        return f"its {part} take {lost:.2g} s longer"


def choose(
    costs_of: Callable[[ParallelLayout], StepCosts],
    devices: int,
    work: PlannedWork,
    *,
    limits: CacheLimits,
    layouts: Sequence[ParallelLayout] = (),
    policy: str | None = None,
    token_budget: int,
    max_num_seqs: int,
) -> list[LayoutForecast]:
    """Ways to use all devices for this work, the best first: by throughput, or at a rate by
    latency.

    All are estimated. The three best single layouts and the three best pairs are also simulated,
    each under every policy that suits it; of a closed batch with requests taken evenly from all of
    them, within about two seconds. What simulation makes of the estimate for these corrects the
    estimate for all.

    What is given is left alone: ``layouts``, one or a pair, or the policy, which then excludes
    pairs unless it is theirs. Raises UsageError if what is given does not suit the model or the
    machine, or the memory does not suffice.
    """
    candidates = find_candidates(costs_of, devices, work, limits=limits)
    if layouts:
        fitting: Sequence[Candidate] = [
            candidates.named("->".join(layout.name for layout in layouts))
        ]
    else:
        fitting = candidates.best(_TOP).fitting
    found = []
    for one in fitting:
        names: Sequence[str] = (DEFAULT_POLICY,)
        if policy:
            names = (policy,)
        elif one.is_pair:
            names = (POLICY_OF_TWO_LAYOUTS,)
        elif one.layouts[0].num_stages > 1:
            names = _POLICIES_OF_STAGES
        if not one.is_pair or names[0].partition(":")[0] == POLICY_OF_TWO_LAYOUTS:
            found += [_forecast(one, name, token_budget, max_num_seqs) for name in names]
    if work.rate:
        return sorted(found, key=lambda one: one.latency)
    return sorted(found, key=lambda one: -one.tokens_per_second)


def choice_text(ranked: Sequence[LayoutForecast], rate: float | None = None) -> str:
    """The choice in one line, with the best other layout, or policy where there is one layout, and
    what it loses by."""

    def figure(one: LayoutForecast) -> str:
        if rate:
            return f"{one.latency:.3g}"
        return f"{one.tokens_per_second:,.0f}"

    best, *others = ranked
    unit = "tokens/s"
    if rate:
        unit = f"s an answer at {rate:.2g} requests/s"
    text = f"{best.name} with {best.policy}: predicted {figure(best)} {unit}"
    if not others:
        return text
    other = next((one for one in others if one.name != best.name), others[0])
    return f"{text}; next {other.name} with {other.policy} {figure(other)}: {other.shortfall(best)}"


def advise(
    costs_of: Callable[[ParallelLayout], StepCosts],
    chosen: Sequence[ParallelLayout],
    work: PlannedWork,
    **settings: Any,
) -> str:
    """Predict the throughput of the chosen layouts for a closed batch, and name a layout that is
    more than 5 % faster on the same devices, in one line. ``settings`` are those of `choose`, which
    says what is raised."""
    devices = chosen[0].devices
    mine, best = (
        choose(costs_of, devices, work, layouts=layouts, **settings)[0] for layouts in (chosen, ())
    )
    text = (
        f"predicted: {mine.tokens_per_second:,.0f} tokens/s under {mine.name}, prompts and answers "
        "together"
    )
    if best.tokens_per_second <= _WORTH_SAYING * mine.tokens_per_second:
        return text
    faster = f"{best.name} with {best.policy} {best.tokens_per_second:,.0f}"
    return f"{text}; {faster}, which --parallel auto --devices {devices} would choose"


def usual_work(
    costs_of: Callable[[ParallelLayout], StepCosts], devices: int, longest: int
) -> PlannedWork:
    """Requests where nobody knows what will come: lengths as in ShareGPT, at most ``longest``
    tokens each, at half the rate that the best layout would bear."""
    drawn = islice(named_lengths(GLLMS_SHAREGPT, 0), _USUAL_REQUESTS)
    prompts = [(min(one.input_tokens, longest - 1), one.output_tokens) for one in drawn]
    work = PlannedWork(
        tuple(RequestShape(size, min(longest - size, answer)) for size, answer in prompts)
    )
    best = find_candidates(costs_of, devices, work).best(1).fitting[0]
    return replace(work, rate=_USUAL_LOAD * best.tokens_per_second * len(work.shapes) / work.tokens)


def _forecast(
    candidate: Candidate, policy: str, token_budget: int, max_num_seqs: int
) -> LayoutForecast:
    part = candidate
    if not candidate.work.rate:
        part = replace(candidate, work=PlannedWork(_sample(candidate.work.shapes)))
    result = part.simulate(make_policy(policy, token_budget), max_num_seqs)
    assert result.ttft_ms is not None and result.e2el_ms is not None, "requests ran"
    first, last = result.ttft_ms.mean / 1000, result.e2el_ms.mean / 1000
    speed = candidate.tokens_per_second * part.work.tokens / result.seconds / part.tokens_per_second
    parts = {"first tokens": first, "later tokens": last - first}
    # what simulation adds to the estimate are waits, of stages and for blocks
    if not candidate.work.rate:
        parts = {
            **candidate.phases,
            "waits": candidate.work.tokens / speed - sum(candidate.phases.values()),
        }
    layouts = tuple(
        replace(costs.layout, data_parallel=candidate.replicas) for costs in candidate.layouts
    )
    return LayoutForecast(layouts, policy, speed, last, parts)


def _sample(shapes: Sequence[RequestShape]) -> tuple[RequestShape, ...]:
    """Take as many shapes as can be simulated, evenly over all of them."""
    mean = sum(shape.output_tokens for shape in shapes) / len(shapes)
    count = max(1, min(len(shapes), _SAMPLED_REQUESTS, int(_SAMPLED_TOKENS / mean)))
    return tuple(shapes[place * len(shapes) // count] for place in range(count))
