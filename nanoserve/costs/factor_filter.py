"""FactorFilter: estimates several factors from measured numbers that each depend on some of them."""

from collections.abc import Iterable, Mapping, Sequence
from math import log, sqrt

import numpy as np

_BOUND = log(8.0)
"""Factors stay between an eighth and 8."""
_MOST_DEVIATIONS, _MOST_AT_ONCE = 2.0, log(2.0)
"""Larger errors are cut to this many deviations, and count as less certain (Huber). The second limit is for the
beginning, when the variance is large and the first steps warm up."""
_FADING = 5e-4
"""Share of the prior covariance that returns with every number: a factor may change while it is not measured."""
_DRIFT = 1e-4
"""Share of its logarithm that an unmeasured factor loses with every number: half of it in 7000."""
_NOISE, _LEAST_NOISE, _MOST_NOISE = 0.3, 0.02, 0.5
"""Relative scatter of measured numbers: initial, least and most."""
_NOISE_RATE = 0.02


class Noise:
    """The relative scatter of numbers of one kind around their expectation; outliers count in part."""

    def __init__(self) -> None:
        self.variance = _NOISE**2

    def observe(self, error: float) -> None:
        """Take in the error of one number, as a logarithm."""
        limited = min(error * error, 9.0 * self.variance)
        variance = self.variance + _NOISE_RATE * (limited - self.variance)
        self.variance = min(max(variance, _LEAST_NOISE**2), _MOST_NOISE**2)


class FactorFilter:
    """A Kalman filter over logarithms of factors.

    One number is measured of a step that has several parts, so each must be given its share of the error. Least mean
    squares would give it to each part by its share of the time, and mistake one part's error for another's as long as
    they come together; it would take thousands of steps to tell them apart. The filter remembers which combinations are
    known already: the first steps with a prompt correct the time of prompts and leave alone what a hundred decodes have
    shown. It costs the square of the number of factors, which are about twenty.

    In logarithms twice and half the time are equally wrong, no factor becomes negative, and a step in which the
    machine stood still is off by 4 or so and not by a thousand deviations; of that, two deviations count.

    Args:
        prior: covariance of the logarithms before anything is measured; their mean is 0.
    """

    def __init__(self, prior: Sequence[Sequence[float]]) -> None:
        self.mean = [0.0] * len(prior)  # the logarithms
        self._covariance = np.array(prior)
        self._doubt = _FADING * self._covariance

    def observe(self, gradient: Mapping[int, float], error: float, noise: Noise) -> None:
        """Take in one number.

        Args:
            gradient: by factor, how the logarithm of the number grows with the factor's.
            error: logarithm of what was measured over what was expected.
            noise: the scatter of such numbers; it takes in this one.
        """
        slopes = np.zeros(len(self.mean))
        slopes[list(gradient)] = list(gradient.values())
        along = self._covariance @ slopes
        known = float(along @ slopes)
        most = min(_MOST_DEVIATIONS * sqrt(known + noise.variance), _MOST_AT_ONCE)
        expected = known + noise.variance * max(1.0, abs(error) / most)
        step = min(max(error, -most), most) / expected
        moved = zip(self.mean, along.tolist(), strict=True)
        self.mean = [min(max(mean + one * step, -_BOUND), _BOUND) for mean, one in moved]
        self._covariance *= 1.0 - _FADING
        self._covariance += self._doubt
        self._covariance -= np.outer(along, along / expected)
        noise.observe(error)

    def drift_back(self, factors: Iterable[int]) -> None:
        """Move factors a little towards 1: those that may not be measured again while they count as slow."""
        for factor in factors:
            self.mean[factor] *= 1.0 - _DRIFT
