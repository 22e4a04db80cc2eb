"""Proof of a profile: a workload runs on the real engine, and in the simulator over what was measured. No torch."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from nanoserve.costs.measured_times import MeasuredTimes
from nanoserve.costs.profile import Prediction, Profile, RunFigures
from nanoserve.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.measures.workloads import RequestShape
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator import StepTimes, Workload, burst, poisson_arrivals, simulate
from nanoserve.simulator.driving import drive
from nanoserve.simulator.meters import RequestMeter

LENGTHS = (RequestShape(64, 32), RequestShape(160, 64), RequestShape(320, 48), RequestShape(32, 96))
"""Of the requests, in turn."""
LOAD = 0.5
"""Arrivals, as a share of the throughput of the closed batch."""
MOST_REQUESTS, FEWEST_REQUESTS = 64, 4
_SECONDS = 2.5
_SHORTER = 4
"""Where a few requests take much longer than that, all of them are shorter by this factor."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """Requests that are the same however often they are asked for; a rate of None means all at once."""

    requests: int
    rate: float | None
    lengths: tuple[RequestShape, ...]

    @property
    def name(self) -> str:
        inputs, outputs = (sum(sizes) / len(self.lengths) for sizes in zip(*map(_sizes, self.lengths), strict=True))
        coming = "at once" if self.rate is None else f"{self.rate:.3g} a second"
        return f"{self.requests} requests of {inputs:.0f}+{outputs:.0f}, {coming}"

    def draw(self, *, after: float = 0.0, name: str = "simulated") -> Iterator[Request]:
        """Each answer has its full length, which the scheduler does not know better than that of any other request."""
        arrivals = burst() if self.rate is None else poisson_arrivals(self.rate, _SEED)
        for request in Workload(arrivals, itertools.cycle(self.lengths), self.requests):
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=request.seed)
            salt = f"{name}-{request.request_id}"
            yield replace(
                request, request_id=salt, params=params, cache_salt=salt, arrival_time=request.arrival_time + after
            )


def _sizes(shape: RequestShape) -> tuple[int, int]:
    return shape.input_tokens, shape.output_tokens


def predict_and_run(
    engine: Engine, config: EngineConfig, profile: Profile, announce: Callable[[str], None], *, repeats: int = 3
) -> list[Prediction]:
    """A closed batch and Poisson arrivals, each simulated and then run ``repeats`` times.

    Args:
        engine: the one that was profiled, with nothing to do.
        config: its settings.
    """
    predicted, times = _Predictor(profile, config), MeasuredTimes(profile)
    closed = _Work(FEWEST_REQUESTS, None, _fitting(engine.scheduler.max_model_len, 1))
    if predicted.figures(times, closed).seconds > 2 * _SECONDS:
        closed = replace(closed, lengths=_fitting(engine.scheduler.max_model_len, _SHORTER))
    while closed.requests < MOST_REQUESTS:
        larger = replace(closed, requests=2 * closed.requests)
        if predicted.figures(times, larger).seconds > _SECONDS:
            break
        closed = larger
    rate = LOAD * closed.requests / predicted.figures(times, closed).seconds
    found = []
    for number, work in enumerate((closed, replace(closed, rate=rate))):
        announce(f"running {work.name}, {repeats} times ...")
        real = tuple(run_for_real(engine, work.draw, f"run-{number}-{repeat}") for repeat in range(repeats))
        found.append(
            Prediction(
                workload=work.name,
                real=real,
                by_profile=predicted.figures(times, work),
                by_factors=predicted.figures(profile.step_costs(), work),
            )
        )
    return found


def _fitting(longest: int, divisor: int) -> tuple[RequestShape, ...]:
    """Of the lengths, divided by that, those that the context holds; or something that any does."""
    shapes = [RequestShape(shape.input_tokens // divisor, shape.output_tokens // divisor) for shape in LENGTHS]
    return tuple(shape for shape in shapes if shape.total_tokens <= longest) or (RequestShape(4, 4),)


class _Predictor:
    """The simulator with the engine's settings."""

    def __init__(self, profile: Profile, config: EngineConfig) -> None:
        self._profile, self._config = profile, config

    def figures(self, times: StepTimes, work: _Work) -> RunFigures:
        """A run in virtual time."""
        config = self._config
        found = simulate(
            make_policy(config.policy_name, config.max_num_batched_tokens),
            times,
            work.draw(),
            num_blocks=self._profile.memory.kv_blocks(config.block_size),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
        )
        ttft, tpot = found.ttft_ms, found.tpot_ms
        assert ttft is not None and tpot is not None, "requests ran, and had several tokens"
        return RunFigures(seconds=found.seconds, ttft_ms=ttft.mean, tpot_ms=tpot.mean)


def run_for_real(engine: Engine, draw: Callable[..., Iterator[Request]], name: str) -> RunFigures:
    """The same requests on the engine's own clock."""
    lives, began = RequestMeter(), engine.now()
    drive(engine, draw(after=began, name=name), lives.on_updates)
    ttft, tpot = lives.ttft.distribution(), lives.tpot.distribution()
    assert ttft is not None and tpot is not None, "requests ran, and had several tokens"
    return RunFigures(seconds=engine.now() - began, ttft_ms=ttft.mean, tpot_ms=tpot.mean)


def mean_figures(runs: Sequence[RunFigures]) -> RunFigures:
    """Each number's mean over runs."""
    return RunFigures(
        **{
            name: sum(getattr(run, name) for run in runs) / len(runs)
            for name in (field.name for field in msgspec.structs.fields(RunFigures))
        }
    )
