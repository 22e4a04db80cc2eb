"""Several variants in interleaved rounds: running them, and medians and ratios of their metrics. No
torch."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, NamedTuple

import msgspec

from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.policies.variants import PolicyVariant, make_requests
from nanoserve.lab.benchmarks.rounds import Bracketed, Key, bracket, grouped, most_known, rotated
from nanoserve.lab.benchmarks.serving.requests import poisson_arrivals
from nanoserve.lab.simulator.pipeline import TieredTimes
from nanoserve.record.metrics import Distribution
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, RequestShape

# metrics of one variant's run, by name: numbers, distributions, and structs or dicts of such
Metrics = dict[str, Any]
# what a pair of variants is called, and their names: the first over the second
Pair = tuple[str, str, str]


class Run(NamedTuple):
    """A variant's run of a round's requests."""

    variant: PolicyVariant  # with what its predictors knew when it began
    record: RunRecord
    # what things took in the same minutes; None if the record says it
    times: TieredTimes | None = None


# of a run, beside the run of the first variant in the same round
Measure = Callable[[Run, Run], Metrics]


class PolicyRound(Bracketed, frozen=True, kw_only=True):
    """Every variant once, with the same requests."""

    variants: dict[str, Metrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Variants, the requests of a case, and the rounds that were measured."""

    case: str  # description of the requests, in a few words
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that a report gives about the case beside its name; none if there is only one case."""
    variants: Sequence[PolicyVariant]
    shapes: Sequence[RequestShape]
    seed: int = 0
    rate: float = float("inf")  # requests per second; if infinite, all come at once
    measure: Measure
    probe: Callable[[], float]  # a reading of the machine's read bandwidth, in bytes per second
    keep: Callable[[str, Run], None] = lambda name, run: None
    """Receives each measured run as it ends, with its name among those of all cases."""
    foreign: ForeignLoad = field(default_factory=ForeignLoad)
    done: list[PolicyRound] = field(default_factory=list)  # the rounds so far that are to be shown
    last: dict[str, Run] = field(default_factory=dict)  # the last run of each variant, by its name

    def requests(self, number: int) -> list[Request]:
        """The requests of a round, whose number gives the seed of their prompts and arrivals; 0 is
        the warm-up."""
        seed, vocab_size = 1000 * self.seed + number, self.variants[0].engine.vocab_size
        return make_requests(
            self.shapes, poisson_arrivals(self.rate, len(self.shapes), seed), vocab_size, seed
        )

    def round(self, number: int) -> PolicyRound:
        """Run and measure every variant; each round begins with another one."""
        # Measured in each round: a machine that others use too is not as fast in one minute as in
        # the next.
        measure_times, times = self.variants[0].engine.measure_times, None
        if measure_times is not None:
            times = measure_times()
        loads: dict[str, float | None] = {}
        with bracket(self.case, number, self.probe) as fields:
            for variant in rotated(self.variants, number - 1):
                # they go on learning
                before = replace(variant, predictors=deepcopy(variant.predictors))
                self.foreign.read()
                run = self.last[variant.name] = Run(
                    before, variant.run(self.requests(number)), times
                )
                loads[variant.name] = self.foreign.read()
                name = variant.name
                if self.facts:
                    name = f"{self.case}, {name}"
                self.keep(name, run)
        first = self.last[self.variants[0].name]
        measured = {one.name: self.measure(self.last[one.name], first) for one in self.variants}
        variants = {
            name: {**figures, "foreign_cores": loads[name]} for name, figures in measured.items()
        }
        return PolicyRound(**fields, foreign_cores=most_known(loads.values()), variants=variants)


def pairs(variants: Sequence[PolicyVariant]) -> list[Pair]:
    """Other policies over the first one on the same engine, and the first engine over others under
    the same policy."""
    found, first = [], variants[0]
    for one, other in combinations(variants, 2):
        if one.place == other.place and one.policy == first.policy:
            found.append((f"{other.policy} over {one.name}", other.name, one.name))
        elif one.policy == other.policy and one.place == first.place:
            found.append((f"{one.place} over {other.place}, {one.policy}", one.name, other.name))
    return found


class Ratio(msgspec.Struct, frozen=True):
    """One variant over another, in the rounds of one bandwidth state."""

    variants: str
    metric: str
    state: str
    rounds: int
    median: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The median, and how far the rounds lie apart."""
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratios(
    rounds: Sequence[PolicyRound], pairs: Sequence[Pair], metrics: Sequence[str]
) -> list[Ratio]:
    """Medians and extremes of each pair, metric and bandwidth state; formed within a round, never
    across rounds."""
    values = grouped(rounds, lambda done: ratios_within(done, pairs, metrics))
    return [
        Ratio(called, metric, state, len(found), statistics.median(found), min(found), max(found))
        for (called, metric, state), found in values.items()
    ]


def ratios_within(
    done: PolicyRound, pairs: Sequence[Pair], metrics: Sequence[str]
) -> dict[Key, float]:
    """Ratios of one round, by the pair's name and metric, where both have it."""
    known = {name: _numbers(figures, metrics) for name, figures in done.variants.items()}
    return {
        (called, metric): value / known[under][metric]
        for called, over, under in pairs
        for metric, value in known[over].items()
        if metric in known[under]
    }


def samples(
    rounds: Sequence[PolicyRound], metrics: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """The metrics of every counting round, for ``bench diff``."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        if not done.counts:
            continue
        for name, figures in done.variants.items():
            for metric, value in _numbers(figures, metrics).items():
                found.setdefault(name, {}).setdefault(metric, []).append(value)
    return found


def _numbers(figures: Metrics, metrics: Sequence[str]) -> dict[str, float]:
    """Numbers of the metrics that are known; of a distribution, its mean."""
    known = {}
    for metric in metrics:
        value = figures[metric]
        if isinstance(value, Distribution):
            value = value.mean
        if value is not None:
            known[metric] = value
    return known


def summarize(rounds: Sequence[PolicyRound]) -> list[dict[str, Any]]:
    """For every state and variant: medians of all metrics over its rounds."""
    found = grouped(
        rounds,
        lambda done: {(name,): msgspec.to_builtins(held) for name, held in done.variants.items()},
    )
    return [
        {"variant": name, "state": state, "rounds": len(held), **_median(held)}
        for (name, state), held in found.items()
    ]


def _median(values: Sequence[Any]) -> Any:
    """Medians of equally built values, number by number; a list becomes a dict with its indices as
    keys, as in "0"."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list | tuple):
        known = [{str(place): part for place, part in enumerate(value)} for value in known]
    if isinstance(known[0], dict):
        return {name: _median([value[name] for value in known]) for name in known[0]}
    return statistics.median(known)
