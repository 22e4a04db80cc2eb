"""Is one report slower than another, beyond chance? Medians with bootstrap confidence intervals. No torch."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from nanoserve.errors import UsageError

RESAMPLES = 2000
CONFIDENCE = 0.95
HIGHER_IS_BETTER = frozenset(
    ["output_tokens_per_s", "goodput_requests_per_s", "prefill_ratio", "decode_ratio", "output_ratio", "of_floor"]
)
"""Metrics for which more is better. All others are durations: less is better."""

Samples = dict[str, dict[str, list[float]]]
"""case -> metric -> its repeated measurements."""


class Change(msgspec.Struct, frozen=True):
    """A metric of a case, after over before."""

    case: str
    metric: str
    before: float
    after: float
    ratio: float
    """Ratio of the medians; low and high bound it with 95 % confidence."""
    low: float
    high: float
    worse: float
    """Share by which the later one is at least worse, with that confidence; 0 if it may be as good."""


class _Row(msgspec.Struct):
    case: str
    samples: dict[str, list[float]] = {}


class _Sampled(msgspec.Struct):
    """The part of a report that is compared: samples of single rows, and those that were formed from several."""

    kind: str
    rows: list[_Row]
    samples: Samples = {}


def compare_reports(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Every metric with repeated measurements that both reports hold for the same case.

    Raises UsageError if they are of different kinds, hold no repeated measurements or have no case in common.
    """
    if before["kind"] != after["kind"]:
        raise UsageError(f"one report is of bench {before['kind']}, the other of bench {after['kind']}")
    earlier, later = _repeated(before), _repeated(after)
    for found in (earlier, later):
        if not found:
            raise UsageError(f"a report of bench {before['kind']} holds no repeated measurements to compare")
    changes = [
        _change(case, metric, samples, later[case][metric])
        for case, metrics in earlier.items()
        for metric, samples in metrics.items()
        if metric in later.get(case, {})
    ]
    if not changes:
        raise UsageError("the reports have no case with repeated measurements in common")
    return changes


def _repeated(report: dict[str, Any]) -> Samples:
    """Samples with at least two measurements: a single value does not show how much it scatters."""
    try:
        found = msgspec.convert(report, _Sampled)
    except msgspec.ValidationError as error:
        raise UsageError(f"a report of bench {report['kind']} is damaged: {error}") from error
    cases = {row.case: row.samples for row in found.rows} | found.samples
    several = {case: {name: some for name, some in metrics.items() if len(some) > 1} for case, metrics in cases.items()}
    return {case: metrics for case, metrics in several.items() if metrics}


def _change(case: str, metric: str, before: Sequence[float], after: Sequence[float]) -> Change:
    low, high = bootstrap_ratio(np.asarray(before), np.asarray(after))
    worst_case = 1 - high if metric in HIGHER_IS_BETTER else low - 1
    medians = float(np.median(before)), float(np.median(after))
    return Change(case, metric, *medians, medians[1] / medians[0], low, high, worse=max(0.0, worst_case))


def bootstrap_ratio(before: "np.ndarray[Any, Any]", after: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Percentile bootstrap interval of median(after) / median(before) (Efron and Tibshirani 1993, chapter 13)."""
    generator = np.random.default_rng(0)
    drawn = [np.median(generator.choice(values, (RESAMPLES, len(values))), axis=1) for values in (before, after)]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn[1] / drawn[0], (tail, 100 - tail))
    return float(low), float(high)
