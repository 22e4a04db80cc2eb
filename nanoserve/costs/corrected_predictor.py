"""CorrectedPredictor: a Predictor that learns from the steps that it predicted, by a FactorFilter.
No torch."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from math import exp, isfinite, log, log2, sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.work import HostBatch, StepFeatures, Strategy

_OCTAVES: Final = 4  # between one size that has a factor of its own and the next: 16 times as large
# Standard deviations of the factors' logarithms before anything is measured: the part that all
# sizes have in common, each size's own, and a strategy's. While all steps are of one, it is not
# seen whether that or the device got slower: it takes a part that makes policies leave it, and the
# steps that follow tell.
_COMMON, _OWN, _OF_STRATEGY = 0.6, 0.4, 0.5
_BOUND = log(8.0)  # factors stay between an eighth and 8
# Larger errors are cut to this many deviations, and count as less certain (Huber). The second limit
# is for the beginning, when the variance is large and the first steps warm up.
_MOST_DEVIATIONS, _MOST_AT_ONCE = 2.0, log(2.0)
_CHANGED = 3  # so many in a row are no outliers
# share of the prior that returns with every number: a factor may change while it is not measured
_FADING = 5e-4
# share of its logarithm that an unmeasured factor loses with every number: half of it in 7000
_DRIFT = 1e-4
# relative scatter of measured numbers: initial, least and most
_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.3, 0.02, 0.5
_NOISE_RATE = 0.02

Vector = NDArray[np.float64]  # a number for each factor


class FactorFilter:
    """A Kalman filter over logarithms of factors, whose covariance before anything is measured is
    `prior`.

    One number is measured of a step that has several parts. The filter remembers which combinations
    are known: the first steps with a prompt correct the time of prompts, not what decodes have
    shown. Least mean squares would take thousands of steps for that. In logarithms twice and half
    the time are equally wrong, no factor becomes negative, and a step in which the machine stood
    still is off by 4 or so, of which two deviations count. When some in a row are off to the same
    side, something has changed, and all is as uncertain as before anything was measured.
    """

    def __init__(self, prior: Vector) -> None:
        self.mean = [0.0] * len(prior)  # the logarithms
        self._prior, self._covariance, self._doubt = prior, prior, _FADING * prior
        # errors in a row that were cut, by kind; negative if below 0
        self._surprises = defaultdict[str, int](int)
        # of numbers around their expectation, by kind
        self._variances = defaultdict[str, float](lambda: _NOISE**2)

    def observe(self, kind: str, gradient: Vector, error: float) -> None:
        """Take in a number of a kind: how its logarithm grows with each factor's, and log(measured
        / expected)."""
        variance = self._variances[kind]
        along = self._covariance @ gradient
        known = float(along @ gradient)
        most = min(_MOST_DEVIATIONS * sqrt(known + variance), _MOST_AT_ONCE)
        expected = known + variance * max(1.0, abs(error) / most)
        step = min(max(error, -most), most) / expected
        moved = zip(self.mean, along.tolist(), strict=True)
        self.mean = [min(max(mean + slope * step, -_BOUND), _BOUND) for mean, slope in moved]
        self._covariance = (
            self._covariance * (1.0 - _FADING) + self._doubt - np.outer(along, along / expected)
        )
        if self._count_surprise(kind, error, most) == _CHANGED:
            self._covariance, self._surprises[kind] = self._prior, 0
        # outliers count in part
        scatter = variance + _NOISE_RATE * (min(error * error, 9.0 * variance) - variance)
        self._variances[kind] = min(max(scatter, _LEAST_NOISE**2), _MOST_NOISE**2)

    def _count_surprise(self, kind: str, error: float, most: float) -> int:
        """Count the errors in a row that lay beyond ``most`` to the same side, this one
        included."""
        before = self._surprises[kind]
        if error > most:
            self._surprises[kind] = max(before, 0) + 1
        elif error < -most:
            self._surprises[kind] = min(before, 0) - 1
        else:
            self._surprises[kind] = 0
        return abs(self._surprises[kind])

    def drift_back(self, factors: Iterable[int]) -> None:
        """Move factors a little towards 1, because they may not be measured again while they count
        as slow."""
        for factor in factors:
            self.mean[factor] *= 1.0 - _DRIFT


class _Part(NamedTuple):
    """A part of a step. Its factor is a line over the logarithm of its size."""

    first: int  # number of its first factor
    factors: int
    smallest: int  # the logarithm (base 16) of the size of the first one

    def shares(self, size: float) -> tuple[tuple[int, float], ...]:
        """The factors between which a size lies, and its nearness to each; the outermost count
        beyond them, too."""
        place = min(max(log2(max(size, 1.0)) / _OCTAVES - self.smallest, 0.0), self.factors - 1.0)
        below = min(int(place), self.factors - 2)
        return (self.first + below, 1.0 - (place - below)), (self.first + below + 1, place - below)


_PARTS: Final = {
    "linear": _Part(0, 4, 0),  # over 1, 16, 256 and 4096 rows of tokens
    "attention": _Part(4, 4, 2),  # over 256 keys to a million
    "prefill attention": _Part(8, 3, 1),  # over 16 tokens to 4096
    "host attention": _Part(11, 4, 2),
    "overhead": _Part(15, 3, 0),
}
_STRATEGIES: Final[dict[Strategy, int]] = {"asymmetric": 18, "overlap": 19}
_FACTORS: Final = 20

Term = tuple[str, float, float]  # a part of a step: its name, its size, and its corrected seconds


def _prior() -> Vector:
    """Covariance: the sizes of a part are wrong alike, for the most part."""
    covariance = np.zeros((_FACTORS, _FACTORS))
    for first, factors, _ in _PARTS.values():
        covariance[first : first + factors, first : first + factors] = (
            _COMMON** 2 + _OWN** 2 * np.eye(factors)
        )
    for index in _STRATEGIES.values():
        covariance[index, index] = _OF_STRATEGY**2
    return covariance


class CorrectedPredictor:
    """A Predictor whose times are those of `base`, each times a factor that is learned while steps
    run.

    Every part of a step has factors, at sizes 16 times apart and a line between them: the linear
    layers, attention of decodes and of prompts, attention on the CPU, and what a step takes beside
    its layers. Each strategy that uses the host has one for the whole step. The same calls of
    ``observe`` and ``observe_host`` give the same predictions.

    Without measurements the host's factors drift back to 1: otherwise a CPU that was slow once
    would never be used.
    """

    def __init__(self, base: Predictor) -> None:
        self.num_layers, self.overlaps = base.num_layers, base.overlaps
        self.slowest_share, self.lone_share = base.slowest_share, base.lone_share
        self._base = base
        self._filter = FactorFilter(_prior())
        self._sizes = {name: 16.0**part.smallest for name, part in _PARTS.items()}

    def linear_seconds(self, tokens: int) -> float:
        return self._factor("linear", tokens) * self._base.linear_seconds(tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        return self._factor("attention", context_tokens) * self._base.attention_seconds(
            context_tokens
        )

    def prefill_attention_seconds(self, tokens: int) -> float:
        return self._factor("prefill attention", tokens) * self._base.prefill_attention_seconds(
            tokens
        )

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        seconds = self._base.host_attention_seconds(sequences, context_tokens)
        return self._factor("host attention", context_tokens) * seconds

    def step_overhead_seconds(self, rows: int = 1) -> float:
        return self._factor("overhead", rows) * self._base.step_overhead_seconds(rows)

    def slowdown(self, strategy: Strategy) -> float:
        slowdown = self._base.slowdown(strategy)
        if strategy in _STRATEGIES:
            slowdown *= exp(self._filter.mean[_STRATEGIES[strategy]])
        return slowdown

    def swap_seconds(self, context_tokens: int) -> float:
        """See Predictor; uncorrected, because swaps are not measured."""
        return self._base.swap_seconds(context_tokens)

    def transition_seconds(self, layout: int) -> float:
        return self._base.transition_seconds(layout)

    def step_seconds(self, work: StepFeatures) -> float:
        """The device's time of a step; an asymmetric one includes its waiting for the CPU."""
        return _seconds(self._step(work)) * self.slowdown(work.strategy)

    def observe(self, work: StepFeatures, seconds: float) -> None:
        """Learn from a step's time, unless it is not positive, or without device rows, which waits
        for the CPU."""
        if not work.device.tokens or not (seconds > 0 and isfinite(seconds)):
            return
        step = self._step(work)
        predicted = _seconds(step)
        if predicted <= 0:
            return
        gradient, used = _by_factor(step), _STRATEGIES.get(work.strategy)
        if used is not None:
            gradient[used] = 1.0
        self._filter.observe(
            "step", gradient, log(seconds / (predicted * self.slowdown(work.strategy)))
        )
        unmeasured = [index for index in _STRATEGIES.values() if index != used]
        if used is None:
            host = _PARTS["host attention"]
            unmeasured += range(host.first, host.first + host.factors)
        self._filter.drift_back(unmeasured)
        self._note_sizes(work)

    def _note_sizes(self, work: StepFeatures) -> None:
        """Remember at which sizes the parts of a step were last measured, for `corrections`."""
        device = work.device
        sizes = {
            "linear": device.tokens,
            "attention": device.decode_context,
            "overhead": work.sampled,
        }
        if device.chunks:
            start, length = device.chunks[-1]
            sizes["prefill attention"] = start + length
        for name, size in sizes.items():
            if size:
                self._sizes[name] = size

    def observe_host(self, sequences: int, context_tokens: int, seconds: float) -> None:
        """Learn from the time of one layer's attention on the CPU."""
        predicted = self.host_attention_seconds(sequences, context_tokens)
        if not (seconds > 0 and isfinite(seconds)) or predicted <= 0:
            return
        gradient = _by_factor([("host attention", context_tokens, predicted)])
        self._filter.observe("host", gradient, log(seconds / predicted))
        self._sizes["host attention"] = context_tokens

    @property
    def corrections(self) -> Mapping[str, float]:
        """The factor of each part at the size it last had, and those of the strategies."""
        factors = {name: self._factor(name, size) for name, size in self._sizes.items()}
        return factors | {
            name: exp(self._filter.mean[index]) for name, index in _STRATEGIES.items()
        }

    def _factor(self, part: str, size: float) -> float:
        mean = self._filter.mean
        return exp(sum([share * mean[index] for index, share in _PARTS[part].shares(size)]))

    def _term(self, part: str, size: float, seconds: float) -> Term:
        return part, size, self._factor(part, size) * seconds

    def _step(self, work: StepFeatures) -> list[Term]:
        """A step without the slowdown of its strategy."""
        rows = work.sampled
        if work.strategy == "overlap":
            rows += sum(
                [batch.sequences for batch in work.host if batch.attended == self.num_layers]
            )
        rows = max(1, rows)
        terms = [self._term("overhead", rows, self._base.step_overhead_seconds(rows))]
        if work.strategy == "asymmetric":
            return terms + self._pipelined(work)
        return terms + self._united(work)

    def _united(self, work: StepFeatures) -> list[Term]:
        """All layers of one batch. Host rows that join in the middle of a layer pass its half and
        that of the next."""
        tokens = work.device.tokens
        alone = self._linear(tokens)
        layers = _times(self.num_layers, alone + self._device_attention(work))
        for batch in work.host:
            passed = 0.5 if batch.attended in (0, self.num_layers) else 1.0
            layers += _times(passed, self._linear(tokens + batch.sequences))
            layers += _times(-passed, alone)
        return layers

    def _pipelined(self, work: StepFeatures) -> list[Term]:
        """Layers of two sub-batches: while the device computes one, the CPU attends for the other,
        and both wait. The rows differ from layer to layer: rows whose tokens were under way skip
        the layers that they have passed."""
        changes = {0, self.num_layers}
        for batch in chain(work.host, work.host_second):
            changes.add(min(batch.first_layer, self.num_layers))
            changes.add(min(batch.attended, self.num_layers))
        attention, layers = self._device_attention(work), list[Term]()
        for layer, until in pairwise(sorted(changes)):
            first = self._linear(work.device.tokens + _rows_in(layer, work.host)) + attention
            second = self._linear(_rows_in(layer, work.host_second))
            layers += _times(
                until - layer, max(first, self._cpu(layer, work.host_second), key=_seconds)
            )
            layers += _times(until - layer, max(second, self._cpu(layer, work.host), key=_seconds))
        return layers

    def _linear(self, tokens: int) -> list[Term]:
        if not tokens:
            return []
        return [self._term("linear", tokens, self._base.linear_seconds(tokens))]

    def _device_attention(self, work: StepFeatures) -> list[Term]:
        """Attention of one layer. A chunk takes the difference of a prompt to its end and one to
        its beginning."""
        keys, attention = work.device.decode_context, list[Term]()
        if keys:
            attention.append(self._term("attention", keys, self._base.attention_seconds(keys)))
        for start, length in work.device.chunks:
            before = self._base.prefill_attention_seconds(start) if start else 0.0
            longer = max(0.0, self._base.prefill_attention_seconds(start + length) - before)
            attention.append(self._term("prefill attention", start + length, longer))
        return attention

    def _cpu(self, layer: int, batches: Sequence[HostBatch]) -> list[Term]:
        attending = [batch for batch in batches if batch.attended <= layer]
        keys = sum([batch.context_tokens for batch in attending])
        if not keys:
            return []
        rows = sum([batch.sequences for batch in attending])
        return [self._term("host attention", keys, self._base.host_attention_seconds(rows, keys))]


def _rows_in(layer: int, batches: Iterable[HostBatch]) -> int:
    return sum([batch.sequences for batch in batches if batch.first_layer <= layer])


def _times(number: float, terms: Iterable[Term]) -> list[Term]:
    return [(part, size, number * seconds) for part, size, seconds in terms]


def _seconds(terms: Iterable[Term]) -> float:
    return sum([seconds for _, _, seconds in terms])


def _by_factor(terms: Iterable[Term]) -> Vector:
    """The share of the terms' seconds that each factor scales."""
    by_factor = [0.0] * _FACTORS  # a list: adding to an element of an array takes ten times as long
    for part, size, seconds in terms:
        for index, share in _PARTS[part].shares(size):
            by_factor[index] += share * seconds
    gradient = np.array(by_factor)
    gradient /= gradient.sum()
    return gradient
