"""Two layouts in turn, and each alone, in interleaved rounds: what each made of the same requests. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import msgspec

from nanoserve.benchmarks.resharding.running import WorkerPlacement, run_in_layouts
from nanoserve.benchmarks.resharding.simulated import ReshardComparison, compare_with_simulator
from nanoserve.benchmarks.variants import VariantsBench, VariantsRound
from nanoserve.layout import ParallelLayout
from nanoserve.record.moves import MoveMetrics, reshard_metrics, swap_metrics
from nanoserve.record.phases import Phase
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.scheduler import Scheduler

RATIOS = ("output_tokens_per_s",)
_PREFILL, _DECODE = 0, 1


@dataclass(frozen=True, slots=True)
class ReshardVariant:
    """A policy on workers in one layout, or in two."""

    policy: str
    """Name of the policy."""
    where: str
    """Name of its workers and layouts."""
    place: WorkerPlacement
    make_scheduler: Callable[[], Scheduler]

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.where}"

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """One layout, or the layouts of prompts and of decodes."""
        return self.place.layouts


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time went, in seconds; all of it where there are two layouts."""

    prefill: float
    decode: float
    """Time in the layout of each, from the first plan to the last answer."""
    draining: float
    """Time until nothing was in flight or on the device."""
    resharding: float
    """Time from telling the workers until all have finished."""
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    """Tokens planned in each phase over its time; None without."""
    through_pool: int
    finished: int
    recomputed: int
    """Sequences at the end of decode phases; PhaseTurn says what each count means."""


class ReshardMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of one variant's run."""

    seconds: float
    """Time from the first arrival to the last token."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests: int
    steps: int
    """Plans with rows."""
    preemptions: int
    transitions: int
    """Changes of layout."""
    phases: PhaseFigures | None
    """Times of the phases; None with one layout."""
    reshards: MoveMetrics | None
    swaps_out: MoveMetrics | None
    swaps_in: MoveMetrics | None
    """What was moved; None with one layout."""
    pool_peak: float | None
    """Largest share of the host pool's blocks in use; None without a pool."""
    simulated: ReshardComparison | None
    """What the simulator makes of it; None where a layout computed nothing."""
    foreign_cores: float | None

    def metric(self, name: str) -> float | None:
        """One of RATIOS."""
        value: float | None = getattr(self, name)
        return value


ReshardRound = VariantsRound[ReshardMetrics]
"""Every variant once, with the same requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardBench(VariantsBench[ReshardVariant, ReshardMetrics]):
    """What the rounds of layouts share."""

    def run(self, variant: ReshardVariant, number: int) -> RunRecord:
        requests = self.make_requests(number)
        return run_in_layouts(variant.place, variant.make_scheduler, requests, vocab_size=self.vocab_size)

    def figures(self, variant: ReshardVariant, record: RunRecord, foreign_cores: float | None) -> ReshardMetrics:
        return figures_of(variant, record, self.vocab_size, foreign_cores)


def figures_of(
    variant: ReshardVariant, record: RunRecord, vocab_size: int, foreign_cores: float | None
) -> ReshardMetrics:
    """Metrics of a run.

    Raises:
        ValueError: if a replay of it makes other plans.
    """
    place, timings, seconds = variant.place, record.timings, record.makespan
    outputs, inputs = sum(one.output_tokens for one in timings), sum(one.input_tokens for one in timings)
    two, link = len(place.layouts) == 2, place.host_link_bandwidth
    used = [blocks.used_host / blocks.host for _, blocks in record.blocks if blocks.host]
    return ReshardMetrics(
        seconds=seconds,
        output_tokens_per_s=outputs / seconds,
        total_tokens_per_s=(inputs + outputs) / seconds,
        requests=len(timings),
        steps=sum(bool(plan.rows) for plan in record.plans),
        preemptions=record.preemptions,
        transitions=sum(plan.transition is not None for plan in record.plans),
        phases=_phase_metrics(record.phases) if two else None,
        reshards=reshard_metrics(record, link) if two else None,
        swaps_out=swap_metrics(record, "out", link) if two else None,
        swaps_in=swap_metrics(record, "in", link) if two else None,
        pool_peak=max(used, default=None),
        simulated=compare_with_simulator(record, place, variant.make_scheduler, vocab_size=vocab_size),
        foreign_cores=foreign_cores,
    )


def _phase_metrics(phases: Sequence[Phase]) -> PhaseFigures:
    prefill = [phase for phase in phases if phase.kind == "compute" and phase.layout == _PREFILL]
    decode = [phase for phase in phases if phase.kind == "compute" and phase.layout == _DECODE]
    turns = [phase.turn for phase in phases if phase.turn is not None and phase.layout == _DECODE]
    return PhaseFigures(
        prefill=_seconds(prefill),
        decode=_seconds(decode),
        draining=_seconds([phase for phase in phases if phase.kind == "drain"]),
        resharding=_seconds([phase for phase in phases if phase.kind == "reshard"]),
        prefill_tokens_per_s=_rate(prefill),
        decode_tokens_per_s=_rate(decode),
        through_pool=sum(turn.through_pool for turn in turns),
        finished=sum(turn.finished for turn in turns),
        recomputed=sum(turn.recomputed for turn in turns),
    )


def _seconds(phases: Sequence[Phase]) -> float:
    return sum(phase.seconds for phase in phases)


def _rate(phases: Sequence[Phase]) -> float | None:
    seconds = _seconds(phases)
    return sum(phase.prompt_tokens + phase.decodes for phase in phases) / seconds if seconds > 0 else None


def pairs(variants: Sequence[ReshardVariant]) -> list[tuple[str, str, str]]:
    """What is held against what, and what that is called: each way of re-sharding against everyone before it."""
    return [
        (f"{other.policy} over {one.name}", other.name, one.name)
        for one, other in combinations(variants, 2)
        if len(other.place.layouts) == 2
    ]
