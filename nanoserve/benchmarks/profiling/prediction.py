"""Proof of a profile, and its rows. No torch.

A workload runs on the real engine, and in the simulator over what was measured. In the rows every measured time stands
beside the least that its bytes and operations take.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from nanoserve.benchmarks.floors import Limits
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.measured_times import MeasuredTimes
from nanoserve.costs.profile import Prediction, Profile, Reached, RunFigures
from nanoserve.costs.work import StepWork
from nanoserve.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.measures.workloads import RequestShape
from nanoserve.record.metrics import LatencyMetrics
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.policies import make_policy
from nanoserve.simulator import StepTimes, Workload, burst, poisson_arrivals, simulate
from nanoserve.simulator.fleet import drive

LENGTHS = (RequestShape(64, 32), RequestShape(160, 64), RequestShape(320, 48), RequestShape(32, 96))
"""Lengths of the requests, in turn."""
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
    """The lengths, divided by that, which fit the context; or lengths that fit any context."""
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
    """Run the requests on the engine's own clock, and return their metrics."""
    lives, began = LatencyMetrics(), engine.now()
    with engine.recorder.observed_by(lives):
        drive(engine, draw(after=began, name=name))
    ttft, tpot = lives.ttft.distribution(), lives.tpot.distribution()
    assert ttft is not None and tpot is not None, "requests ran, and had several tokens"
    return RunFigures(seconds=engine.now() - began, ttft_ms=ttft.mean, tpot_ms=tpot.mean)


def mean_figures(runs: Sequence[RunFigures]) -> RunFigures:
    """Mean of each metric over runs."""
    return RunFigures(
        **{
            name: sum(getattr(run, name) for run in runs) / len(runs)
            for name in (field.name for field in msgspec.structs.fields(RunFigures))
        }
    )


Fields = Mapping[str, Any]
_MICROSECONDS = 1e6


def time_rows(profile: Profile) -> list[Fields]:
    """Every measured time."""
    return [*_linear_rows(profile), *_attention_rows(profile), *_other_rows(profile)]


def _counts(profile: Profile) -> ModelCounts:
    return ModelCounts(
        profile.model,
        precision=Precision(weight_bits=profile.bits, kv_bits=profile.bits, other_bits=profile.bits),
    )


def _limits(reached: Reached) -> Limits:
    return Limits(reached.read_bytes_per_second, reached.operations_per_second)


def _linear_rows(profile: Profile) -> Iterator[Fields]:
    """A layer, the mean over all."""
    counts, layers, limits = _counts(profile), profile.model.num_layers, _limits(profile.device)
    for place, tokens in enumerate(profile.linear.sizes):
        products = list(counts.products(StepWork(decodes=tokens), 0))
        weights = sum(some * matrix.weights_read(count) * matrix.bytes_per_weight for matrix, count, some in products)
        flops = sum(some * 2.0 * matrix.per_token * count for matrix, count, some in products)
        floor = limits.seconds(weights / layers, flops / layers)
        yield _row("layer without attention", f"{tokens:,} tokens", profile.linear, place, floor)


def _attention_rows(profile: Profile) -> Iterator[Fields]:
    counts, limits = _counts(profile), _limits(profile.device)
    for place, tokens in enumerate(profile.prefill_attention.sizes):
        pairs = tokens * (tokens + 1) / 2
        floor = limits.seconds(tokens * counts.layer_kv_bytes, pairs * counts.layer_flops_per_pair)
        yield _row("attention of a prompt", f"{tokens:,} tokens", profile.prefill_attention, place, floor)
    yield from _grid_rows("decode attention", profile.decode_attention, counts, limits)
    yield from _grid_rows("attention in host memory", profile.host_attention, counts, _limits(profile.host))


def _grid_rows(name: str, grid: MeasuredGrid, counts: ModelCounts, limits: Limits) -> Iterator[Fields]:
    for batch, seconds, low, high in zip(grid.batches, grid.seconds, grid.low, grid.high, strict=True):
        for place, context in enumerate(grid.contexts):
            keys = batch * context
            floor = limits.seconds(keys * counts.layer_kv_bytes, keys * counts.layer_flops_per_pair)
            times = (seconds[place], low[place], high[place])
            yield _fields(name, f"{batch} x {context:,} keys", times, floor)


def _other_rows(profile: Profile) -> Iterator[Fields]:
    counts, limits = _counts(profile), _limits(profile.device)
    for place, rows in enumerate(profile.head.sizes):
        head = counts.head.operator(rows, 1, 0.0)
        floor = limits.seconds(head.weight_bytes, head.flops)
        yield _row("head and sampling", f"{rows} rows", profile.head, place, floor)
    for name, curve in (("inputs", profile.inputs), ("engine", profile.engine)):
        for place, rows in enumerate(curve.sizes):
            yield _row(name, f"{rows} rows", curve, place, None)
    for place, rows in enumerate(profile.host_exchange.sizes):
        yield _row("exchange with host memory", f"{rows} rows", profile.host_exchange, place, None)
    for place, size in enumerate(profile.copy.sizes):
        yield _row("copy", f"{size / 2**20:g} MiB", profile.copy, place, None)


def _row(name: str, size: str, curve: MeasuredCurve, place: int, floor: float | None) -> Fields:
    return _fields(name, size, (curve.seconds[place], curve.low[place], curve.high[place]), floor)


def _fields(name: str, size: str, times: tuple[float, float, float], floor: float | None) -> Fields:
    seconds, low, high = (value * _MICROSECONDS for value in times)
    share = None if floor is None else floor * _MICROSECONDS / seconds
    return {"part": name, "size": size, "us": seconds, "low": low, "high": high, "of_floor": share}


def prediction_rows(predictions: tuple[Prediction, ...]) -> Iterator[Fields]:
    """Three rows for each workload: what really was, with the range over its runs, and both predictions of it."""
    for found in predictions:
        mean = mean_figures(found.real)
        yield {"workload": found.workload, "route": "real", **_figures(mean), **_ranges(found.real)}
        for route, figures in (("measured times", found.by_profile), ("factors", found.by_factors)):
            errors = {
                f"{name}_error": getattr(figures, name) / getattr(mean, name) - 1
                for name in ("seconds", "ttft_ms", "tpot_ms")
            }
            yield {"workload": "", "route": route, **_figures(figures), **errors}


def _figures(figures: RunFigures) -> Fields:
    return {"seconds": figures.seconds, "ttft_ms": figures.ttft_ms, "tpot_ms": figures.tpot_ms}


def _ranges(runs: tuple[RunFigures, ...]) -> Fields:
    """Half of the way from the lowest to the highest, over the mean."""
    mean = mean_figures(runs)
    return {
        f"{name}_range": (max(values) - min(values)) / 2 / getattr(mean, name)
        for name in ("seconds", "ttft_ms", "tpot_ms")
        for values in ([getattr(run, name) for run in runs],)
    }
