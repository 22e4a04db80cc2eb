"""A profile as rows of tables: every measured time beside the least that its bytes and operations take. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.profiling.prediction import mean_figures
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.profile import Prediction, Profile, Reached, RunFigures
from nanoserve.costs.work import StepWork

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
