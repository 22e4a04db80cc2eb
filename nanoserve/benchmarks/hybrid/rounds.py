"""The device alone and with the CPU's help, in interleaved rounds: what each made of the same requests. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from nanoserve.benchmarks.hybrid.gains import Gains, device_slowness, gains, host_rate
from nanoserve.benchmarks.hybrid.latencies import Latencies
from nanoserve.benchmarks.hybrid.policies import HybridEngine, Variant
from nanoserve.benchmarks.hybrid.prediction import PredictionErrors
from nanoserve.benchmarks.hybrid.simulated import Simulation, simulate_run
from nanoserve.benchmarks.hybrid.steps import StepCounts, decode_steps
from nanoserve.benchmarks.pipeline.running import run_requests
from nanoserve.benchmarks.variants import VariantsBench, VariantsRound
from nanoserve.record.run_record import RunRecord
from nanoserve.simulator.pipeline import TieredTimes

RATIOS = ("output_tokens_per_s",)
_TOLERANCE = 0.02
"""By so much of the device's tokens per second a gain may be beyond its bound and count as at it: step times scatter,
and the closed form takes the second pass through the linear layers to be as long as the first, which has more rows."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one variant's run."""

    seconds: float
    """From the first arrival to the last token."""
    output_tokens_per_s: float
    latencies: Latencies
    steps: StepCounts
    device_share: float
    processor_share: float
    """Of that time, in which a step was under way, and in which the CPU attended."""
    engine_ms: float
    """The engine's part of a step, the median: from when results are known until the next plan is made."""
    swaps_out: int
    swaps_in: int
    """Sequences that moved from device to host memory, and back."""
    preemptions: int
    errors: PredictionErrors
    """Of what was predicted of the steps."""
    gains: Gains | None
    """Of steps without prompts, over the device alone; None until the round is over."""
    simulated: Simulation
    """What the simulator makes of the same requests, in the times that were measured in the round."""
    simulation_error: float
    """Its tokens per second over the real ones, less 1."""
    foreign_cores: float | None

    def metric(self, name: str) -> float | None:
        """One of RATIOS."""
        value: float | None = getattr(self, name)
        return value


HybridRound = VariantsRound[Figures]
"""Every variant once, with the same requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(VariantsBench[Variant, Figures]):
    """What the rounds of one case share."""

    engine: HybridEngine
    """Runs all of them."""
    block_size: int
    """Tokens of a KV block."""
    _runs: dict[str, RunRecord] = field(default_factory=dict, init=False)
    _times: list[TieredTimes] = field(default_factory=list, init=False)

    def run(self, variant: Variant, number: int) -> RunRecord:
        requests = self.make_requests(number)
        record = run_requests(self.engine.executor, variant.make_scheduler, requests, vocab_size=self.vocab_size)
        self._runs[variant.name] = record
        return record

    def figures(self, variant: Variant, record: RunRecord, foreign_cores: float | None) -> Figures:
        simulated = simulate_run(
            record, self._times[-1], variant.make_simulated, block_size=self.block_size, vocab_size=self.vocab_size
        )
        return figures_of(record, simulated, foreign_cores)

    def rounds(self, wanted: int) -> Iterator[HybridRound]:
        """As they are done. Gains are known when the device alone has run too, in whatever turn."""
        for done in VariantsBench.rounds(self, wanted):
            held = _with_gains(done.variants, self._runs, self.variants[0].name, self.engine)
            yield msgspec.structs.replace(done, variants=held)

    def _round(self, number: int) -> HybridRound:
        # Measured in each round: a machine that others use too is not as fast in one minute as in the next.
        self._times.append(self.engine.measure_times())
        return VariantsBench._round(self, number)


def _with_gains(
    figures: dict[str, Figures], runs: dict[str, RunRecord], device_only: str, engine: HybridEngine
) -> dict[str, Figures]:
    predictor = engine.predictor
    slowness = device_slowness(decode_steps(runs[device_only], predictor.num_layers), predictor)
    if slowness is None:
        return figures
    found = {}
    for name, one in figures.items():
        record = runs[name]
        rate = host_rate(work for result in record.results for work in result.host_work)
        steps = list(decode_steps(record, predictor.num_layers))
        found[name] = msgspec.structs.replace(one, gains=gains(steps, predictor, slowness=slowness, rate=rate))
    return found


def figures_of(record: RunRecord, simulated: Simulation, foreign_cores: float | None) -> Figures:
    """What came of a run."""
    seconds, plans = record.makespan, record.plans
    directions = [swap.direction for plan in plans for swap in plan.swaps]
    attending = sum(work.seconds for result in record.results for work in result.host_work)
    return Figures(
        seconds=seconds,
        output_tokens_per_s=sum(one.output_tokens for one in record.timings) / seconds,
        latencies=Latencies.of(record),
        steps=StepCounts.of(plans),
        device_share=sum(result.seconds for result in record.results) / seconds,
        processor_share=attending / seconds,
        engine_ms=1000 * median(planned.time - planned.clock for planned in record.planned.values()),
        swaps_out=directions.count("out"),
        swaps_in=directions.count("in"),
        preemptions=record.preemptions,
        errors=PredictionErrors.of(record.forecasts),
        gains=None,
        simulated=simulated,
        simulation_error=seconds / simulated.seconds - 1,
        foreign_cores=foreign_cores,
    )


def pairs(policies: Sequence[str]) -> list[tuple[str, str, str]]:
    """What is held against what, and what that is called: everyone against the first."""
    first, *others = policies
    return [(f"{other} over {first}", other, first) for other in others]


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What the paper and the policies promise, and where it did not hold."""

    hybrid_although_it_fits: tuple[str, ...]
    """Variants with hybrid steps in a case in which the device holds everything."""
    beyond_bound: tuple[str, ...]
    """Variants whose gain in some round was beyond the closed form."""


def findings(rounds: Sequence[HybridRound], *, holds_everything: bool) -> Findings:
    """Look at the rounds of a case, those that do not count too: counts and bounds hold on a busy machine as well.

    Args:
        holds_everything: whether the device does in this case.
    """
    found = [(name, figures) for done in rounds for name, figures in done.variants.items()]
    return Findings(
        hybrid_although_it_fits=_names(name for name, figures in found if holds_everything and figures.steps.hybrid),
        beyond_bound=_names(name for name, figures in found if _is_beyond(figures)),
    )


def _names(names: Iterator[str]) -> tuple[str, ...]:
    """Each once."""
    return tuple(dict.fromkeys(names))


def _is_beyond(figures: Figures) -> bool:
    held = figures.gains
    parts = () if held is None else (held.asymmetric, held.overlap)
    return any(part is not None and part.gain > part.bound + _TOLERANCE for part in parts)
