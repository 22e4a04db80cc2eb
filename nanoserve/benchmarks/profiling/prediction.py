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
from nanoserve.costs.curves import MeasuredCurve
from nanoserve.costs.hardware import Device
from nanoserve.costs.profile import MeasuredTimes, Prediction, Profile, RunFigures
from nanoserve.costs.work import StepWork
from nanoserve.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.measures.metrics import Distribution
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
        inputs = sum(shape.input_tokens for shape in self.lengths) / len(self.lengths)
        outputs = sum(shape.output_tokens for shape in self.lengths) / len(self.lengths)
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


def predict_and_run(
    engine: Engine, config: EngineConfig, profile: Profile, announce: Callable[[str], None], *, repeats: int = 3
) -> list[Prediction]:
    """A closed batch and Poisson arrivals, each simulated and then run ``repeats`` times.

    Args:
        engine: the one that was profiled, with nothing to do.
        config: its settings.
    """

    def predict(work: _Work, costs: StepTimes | None = None) -> RunFigures:
        """The run in virtual time, with the engine's settings."""
        found = simulate(
            make_policy(config.policy_name, config.max_num_batched_tokens),
            costs or times,
            work.draw(),
            num_blocks=profile.memory.kv_blocks(config.block_size),
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
        )
        return _figures(found.seconds, found.ttft_ms, found.tpot_ms)

    times = MeasuredTimes(profile)
    closed = _Work(FEWEST_REQUESTS, None, _fitting(engine.scheduler.table.max_model_len, 1))
    if predict(closed).seconds > 2 * _SECONDS:
        closed = replace(closed, lengths=_fitting(engine.scheduler.table.max_model_len, _SHORTER))
    while closed.requests < MOST_REQUESTS:
        larger = replace(closed, requests=2 * closed.requests)
        if predict(larger).seconds > _SECONDS:
            break
        closed = larger
    rate = LOAD * closed.requests / predict(closed).seconds
    found = []
    for number, work in enumerate((closed, replace(closed, rate=rate))):
        announce(f"running {work.name}, {repeats} times ...")
        real = tuple(run_for_real(engine, work.draw, f"run-{number}-{repeat}") for repeat in range(repeats))
        found.append(
            Prediction(
                workload=work.name,
                real=real,
                by_profile=predict(work),
                by_factors=predict(work, profile.step_costs()),
            )
        )
    return found


def _fitting(longest: int, divisor: int) -> tuple[RequestShape, ...]:
    """The lengths, divided by that, which fit the context; or lengths that fit any context."""
    shapes = [RequestShape(shape.input_tokens // divisor, shape.output_tokens // divisor) for shape in LENGTHS]
    return tuple(shape for shape in shapes if shape.total_tokens <= longest) or (RequestShape(4, 4),)


def run_for_real(engine: Engine, draw: Callable[..., Iterator[Request]], name: str) -> RunFigures:
    """Run the requests on the engine's own clock, and return their metrics."""
    lives, began = LatencyMetrics(), engine.now()
    with engine.recorder.observed_by(lives):
        drive(engine, draw(after=began, name=name))
    return _figures(engine.now() - began, lives.ttft.distribution(), lives.tpot.distribution())


def _figures(seconds: float, ttft_ms: Distribution | None, tpot_ms: Distribution | None) -> RunFigures:
    assert ttft_ms is not None and tpot_ms is not None, "requests ran, and had several tokens"
    return RunFigures(seconds=seconds, ttft_ms=ttft_ms.mean, tpot_ms=tpot_ms.mean)


Fields = Mapping[str, Any]
_MICROSECONDS = 1e6


def time_rows(profile: Profile) -> Iterator[Fields]:
    """Every measured time, and its share of the least time that its bytes and operations take, where these count."""
    floors = _PartFloors(profile)
    yield from _curve_rows("layer without attention", "{:,} tokens", profile.linear, floors.linear)
    yield from _curve_rows("attention of a prompt", "{:,} tokens", profile.prefill_attention, floors.prompt)
    for part, grid, reached in (
        ("decode attention", profile.decode_attention, profile.device),
        ("attention in host memory", profile.host_attention, profile.host),
    ):
        for batch, *rows in zip(grid.batches, grid.seconds, grid.low, grid.high, strict=True):
            for context, *times in zip(grid.contexts, *rows, strict=True):
                keys = batch * context
                yield _fields(part, f"{batch} x {context:,} keys", times, floors.attention(reached, keys, keys))
    yield from _curve_rows("head and sampling", "{} rows", profile.head, floors.head)
    yield from _curve_rows("inputs", "{} rows", profile.inputs)
    yield from _curve_rows("engine", "{} rows", profile.engine)
    yield from _curve_rows("exchange with host memory", "{} rows", profile.host_exchange)
    yield from _curve_rows("copy", "{1:g} MiB", profile.copy)


class _PartFloors:
    """The least seconds of a part of a step."""

    def __init__(self, profile: Profile) -> None:
        precision = Precision.of(profile.bits)
        self._counts, self._device = ModelCounts(profile.model, precision=precision), profile.device
        self._layers = profile.model.num_layers

    def linear(self, tokens: int) -> float:
        """A layer, the mean over all."""
        products = list(self._counts.products(StepWork(decodes=tokens), 0))
        weights, flops = sum(one.weight_bytes for one in products), sum(one.flops for one in products)
        return _limits(self._device).seconds(weights / self._layers, flops / self._layers)

    def attention(self, reached: Device, keys: int, pairs: float) -> float:
        counts = self._counts
        return _limits(reached).seconds(keys * counts.layer_kv_bytes, pairs * counts.layer_flops_per_pair)

    def prompt(self, tokens: int) -> float:
        return self.attention(self._device, tokens, tokens * (tokens + 1) / 2)

    def head(self, rows: int) -> float:
        operator = self._counts.product(self._counts.head, rows)
        return _limits(self._device).seconds(operator.weight_bytes, operator.flops)


def _limits(reached: Device) -> Limits:
    return Limits(reached.memory_bandwidth, reached.flops)


def _curve_rows(
    part: str, size: str, curve: MeasuredCurve, floor: Callable[[int], float] | None = None
) -> Iterator[Fields]:
    for count, *times in zip(curve.sizes, curve.seconds, curve.low, curve.high, strict=True):
        yield _fields(part, size.format(count, count / 2**20), times, floor and floor(count))


def _fields(part: str, size: str, times: Sequence[float], floor: float | None) -> Fields:
    seconds, low, high = (value * _MICROSECONDS for value in times)
    share = None if floor is None else floor * _MICROSECONDS / seconds
    return {"part": part, "size": size, "us": seconds, "low": low, "high": high, "of_floor": share}


def prediction_rows(predictions: tuple[Prediction, ...]) -> Iterator[Fields]:
    """Three rows for each workload: what really was, with half of the range over its runs, and both predictions."""
    for found in predictions:
        runs = [msgspec.structs.asdict(run) for run in found.real]
        values = {name: [run[name] for run in runs] for name in runs[0]}
        mean = {name: sum(some) / len(some) for name, some in values.items()}
        ranges = {f"{name}_range": (max(some) - min(some)) / 2 / mean[name] for name, some in values.items()}
        yield {"workload": found.workload, "route": "real", **mean, **ranges}
        for route, figures in (("measured times", found.by_profile), ("factors", found.by_factors)):
            predicted = msgspec.structs.asdict(figures)
            errors = {f"{name}_error": value / mean[name] - 1 for name, value in predicted.items()}
            yield {"workload": "", "route": route, **predicted, **errors}
