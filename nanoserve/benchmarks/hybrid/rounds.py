"""The device alone and with the CPU's help, in interleaved rounds: what each made of the same requests. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec

from nanoserve.benchmarks.contenders import ContendersBench, ContendersRound
from nanoserve.benchmarks.hybrid.gains import Gains, device_slowness, gains, host_rate
from nanoserve.benchmarks.hybrid.latencies import Latencies
from nanoserve.benchmarks.hybrid.policies import Contender, HybridEngine
from nanoserve.benchmarks.hybrid.prediction import PredictionErrors
from nanoserve.benchmarks.hybrid.running import HybridRun, run_requests
from nanoserve.benchmarks.hybrid.simulated import Simulation, simulate_run
from nanoserve.benchmarks.hybrid.steps import StepCounts, decode_steps
from nanoserve.simulator.pipeline import TieredTimes

RATIOS = ("output_tokens_per_s",)
_TOLERANCE = 0.02
"""By so much of the device's tokens per second a gain may be beyond its bound and count as at it: step times scatter,
and the closed form takes the second pass through the linear layers to be as long as the first, which has more rows."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one contender's run.

    Attributes:
        seconds: from the first arrival to the last token.
        device_share, processor_share: of that time, in which a step was under way, and in which the CPU attended.
        engine_ms: the engine's part of a step, the median: from when results are known until the next plan is made.
        swaps_out, swaps_in: sequences that moved from device to host memory, and back.
        errors: of what was predicted of the steps.
        gains: of steps without prompts, over the device alone; None until the round is over.
        simulated: what the simulator makes of the same requests, in the times that were measured in the round.
        simulation_error: its tokens per second over the real ones, less 1.
    """

    seconds: float
    output_tokens_per_s: float
    latencies: Latencies
    steps: StepCounts
    device_share: float
    processor_share: float
    engine_ms: float
    swaps_out: int
    swaps_in: int
    preemptions: int
    errors: PredictionErrors
    gains: Gains | None
    simulated: Simulation
    simulation_error: float
    foreign_cores: float | None

    def metric(self, name: str) -> float | None:
        """One of RATIOS."""
        value: float | None = getattr(self, name)
        return value


HybridRound = ContendersRound[Figures]
"""Every contender once, with the same requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(ContendersBench[Contender, HybridRun, Figures]):
    """What the rounds of one case share.

    Attributes:
        engine: runs all of them.
        block_size: tokens of a KV block.
    """

    engine: HybridEngine
    block_size: int
    _runs: dict[str, HybridRun] = field(default_factory=dict, init=False)
    _times: list[TieredTimes] = field(default_factory=list, init=False)

    def run(self, contender: Contender, number: int) -> HybridRun:
        requests = self.make_requests(number)
        run = run_requests(self.engine.executor, contender.make_scheduler, requests, vocab_size=self.vocab_size)
        self._runs[contender.name] = run
        return run

    def figures(self, contender: Contender, run: HybridRun, foreign_cores: float | None) -> Figures:
        simulated = simulate_run(
            run, self._times[-1], contender.make_simulated, block_size=self.block_size, vocab_size=self.vocab_size
        )
        return figures_of(run, simulated, foreign_cores)

    def rounds(self, wanted: int) -> Iterator[HybridRound]:
        """As they are done. Gains are known when the device alone has run too, in whatever turn."""
        for done in ContendersBench.rounds(self, wanted):
            held = _with_gains(done.contenders, self._runs, self.contenders[0].name, self.engine)
            yield msgspec.structs.replace(done, contenders=held)

    def _round(self, number: int) -> HybridRound:
        # Measured in each round: a machine that others use too is not as fast in one minute as in the next.
        self._times.append(self.engine.measure_times())
        return ContendersBench._round(self, number)


def _with_gains(
    figures: dict[str, Figures], runs: dict[str, HybridRun], device_only: str, engine: HybridEngine
) -> dict[str, Figures]:
    predictor = engine.predictor
    slowness = device_slowness(decode_steps(runs[device_only], predictor.num_layers), predictor)
    if slowness is None:
        return figures
    found = {}
    for name, one in figures.items():
        run = runs[name]
        rate = host_rate(work for result in run.results for work in result.host_work)
        steps = list(decode_steps(run, predictor.num_layers))
        found[name] = msgspec.structs.replace(one, gains=gains(steps, predictor, slowness=slowness, rate=rate))
    return found


def figures_of(run: HybridRun, simulated: Simulation, foreign_cores: float | None) -> Figures:
    """What came of a run."""
    seconds, record, plans = run.outcome.makespan, run.record, run.record.plans
    directions = [swap.direction for plan in plans for swap in plan.swaps]
    attending = sum(work.seconds for result in run.results for work in result.host_work)
    return Figures(
        seconds=seconds,
        output_tokens_per_s=sum(one.output_tokens for one in run.outcome.timings) / seconds,
        latencies=Latencies.of(run),
        steps=StepCounts.of(plans),
        device_share=sum(result.seconds for result in run.results) / seconds,
        processor_share=attending / seconds,
        engine_ms=1000 * median(record.handed_over[plan.step] - record.submitted[plan.step] for plan in plans),
        swaps_out=directions.count("out"),
        swaps_in=directions.count("in"),
        preemptions=run.preemptions,
        errors=PredictionErrors.of(run.forecasts),
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
    """What the paper and the policies promise, and where it did not hold.

    Attributes:
        hybrid_although_it_fits: contenders with hybrid steps in a case in which the device holds everything.
        beyond_bound: contenders whose gain in some round was beyond the closed form.
    """

    hybrid_although_it_fits: tuple[str, ...]
    beyond_bound: tuple[str, ...]


def findings(rounds: Sequence[HybridRound], *, holds_everything: bool) -> Findings:
    """Look at the rounds of a case, those that do not count too: counts and bounds hold on a busy machine as well.

    Args:
        holds_everything: whether the device does in this case.
    """
    found = [(name, figures) for done in rounds for name, figures in done.contenders.items()]
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
