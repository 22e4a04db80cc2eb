"""Several variants in interleaved rounds: running them, figures of each, medians, and ratios in a round. No torch."""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.rounds import GIGA, Bracketed, bandwidth_states, until_enough_count
from nanoserve.layout import ParallelLayout
from nanoserve.measures.chrome_trace import ChromeTraceFile
from nanoserve.record.run_record import RunRecord
from nanoserve.record.trace import RunTrace
from nanoserve.request import Request


class ComparedFigures(Protocol):
    """What came of one variant's run: a struct of numbers, perhaps nested."""

    def metric(self, name: str) -> float | None:
        """One of those that ratios are formed of; None where the run has none."""


class Named(Protocol):
    """A variant."""

    @property
    def name(self) -> str:
        """What its figures are filed under."""


F = TypeVar("F", bound=ComparedFigures)
C = TypeVar("C", bound=Named)


class KeptRun(NamedTuple):
    """A run, and the parallel layouts that it had."""

    name: str
    record: RunRecord
    layouts: Sequence[ParallelLayout] = (ParallelLayout(),)


class KeptRuns:
    """The last run of each variant, to be drawn; all runs are written into a trace as they are done.

    Args:
        file: of the trace; None writes none.
    """

    def __init__(self, file: ChromeTraceFile | None) -> None:
        self.last: dict[str, KeptRun] = {}  # by name
        self._file = file
        self._began: float | None = None

    def keep(self, run: KeptRun, host_link_bandwidth: float | None = None) -> None:
        """A run is done. In the trace it stands behind those before it, on tracks of its own.

        Raises:
            RuntimeFailure: if it cannot be written.
        """
        name, record, layouts = self.last[run.name] = run
        if self._began is None:
            self._began = record.arrivals[0].arrival_time
        if self._file is not None:
            trace = RunTrace(
                self._file,
                self._began,
                layouts=layouts,
                tells_times=bool(record.stage_times),
                host_link_bandwidth=host_link_bandwidth,
                name=name,
            )
            for event in record.events:
                trace(event)


class VariantsRound(Bracketed, Generic[F], frozen=True, kw_only=True):
    """Every variant once, with the same requests."""

    variants: dict[str, F]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantsBench(ABC, Generic[C, F]):
    """What all rounds share."""

    case: str
    """What the requests are, in a few words."""
    variants: Sequence[C]
    make_requests: Callable[[int], list[Request]]
    """Those of a round, by its number; 0 is the warm-up."""
    vocab_size: int
    probe: Callable[[], float]
    """A reading of the machine's read bandwidth, in bytes per second."""
    foreign: ForeignLoad
    keep: Callable[[C, RunRecord], None]
    """Is given each measured run as it is done."""

    @abstractmethod
    def run(self, variant: C, number: int) -> RunRecord:
        """Have a variant do a round's requests."""

    @abstractmethod
    def figures(self, variant: C, record: RunRecord, foreign_cores: float | None) -> F:
        """What came of its run, beside which others kept so many cores busy."""

    def warm_up(self) -> None:
        """Run every variant once, unmeasured."""
        for variant in self.variants:
            self.run(variant, 0)

    def rounds(self, wanted: int) -> Iterator[VariantsRound[F]]:
        """As they are done, until enough count or too many were tried; each begins with another variant."""
        return until_enough_count(self._round, wanted)

    def _round(self, number: int) -> VariantsRound[F]:
        turn = (number - 1) % len(self.variants)
        before = self.probe() / GIGA
        done: dict[str, F] = {}
        loads: list[float] = []
        for variant in [*self.variants[turn:], *self.variants[:turn]]:
            self.foreign.read()
            record = self.run(variant, number)
            foreign_cores = self.foreign.read()
            if foreign_cores is not None:
                loads.append(foreign_cores)
            done[variant.name] = self.figures(variant, record, foreign_cores)
            self.keep(variant, record)
        return VariantsRound(
            case=self.case,
            number=number,
            bandwidth_before=before,
            bandwidth_after=self.probe() / GIGA,
            foreign_cores=max(loads, default=None),
            variants={variant.name: done[variant.name] for variant in self.variants},
        )


class Ratio(msgspec.Struct, frozen=True):
    """One variant over another, in the rounds of one bandwidth state."""

    variants: str
    metric: str
    state: str
    rounds: int
    median: float
    low: float
    high: float


def ratios(
    rounds: Sequence[VariantsRound[F]], held: Sequence[tuple[str, str, str]], metrics: Sequence[str]
) -> list[Ratio]:
    """Medians and extremes of each pair, metric and bandwidth state; formed within a round, never across rounds.

    Args:
        held: what a pair is called, and its two variants: the first over the second.
    """
    values: dict[tuple[str, str, str], list[float]] = {}
    for place, state in sorted(bandwidth_states(rounds).items()):
        for (called, metric), ratio in ratios_within(rounds[place].variants, held, metrics).items():
            values.setdefault((called, metric, state), []).append(ratio)
    return [
        Ratio(*key, rounds=len(found), median=statistics.median(found), low=min(found), high=max(found))
        for key, found in values.items()
    ]


def ratios_within(
    variants: Mapping[str, ComparedFigures], held: Sequence[tuple[str, str, str]], metrics: Sequence[str]
) -> dict[tuple[str, str], float]:
    """Of one round: by what a pair is called and metric; without those that one of the two does not have."""
    found = {}
    for called, over, under in held:
        for metric in metrics:
            above, below = variants[over].metric(metric), variants[under].metric(metric)
            if above is not None and below is not None:
                found[called, metric] = above / below
    return found


def samples(rounds: Sequence[VariantsRound[F]], metrics: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """The figures of every counting round, for ``bench diff``."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        for name, figures in done.variants.items() if done.counts else ():
            for metric in metrics:
                value = figures.metric(metric)
                if value is not None:
                    found.setdefault(name, {}).setdefault(metric, []).append(value)
    return found


def summarize(rounds: Sequence[VariantsRound[F]]) -> list[dict[str, Any]]:
    """For every state and variant: medians over the counting rounds of what tables show."""
    groups: dict[tuple[str, str], list[F]] = {}
    for place, state in sorted(bandwidth_states(rounds).items()):
        for name, figures in rounds[place].variants.items():
            groups.setdefault((state, name), []).append(figures)
    return [{"variant": name, "state": state, **_medians(found)} for (state, name), found in groups.items()]


def _medians(found: Sequence[ComparedFigures]) -> dict[str, Any]:
    return {"rounds": len(found), **_median([msgspec.to_builtins(figures) for figures in found])}


def _median(values: Sequence[Any]) -> Any:
    """Of equally built values, number by number; what lies in a list is found by its place, as "0"."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], list | tuple):
        known = [{str(place): part for place, part in enumerate(value)} for value in known]
    if isinstance(known[0], dict):
        return {name: _median([value[name] for value in known]) for name in known[0]}
    return statistics.median(known)
