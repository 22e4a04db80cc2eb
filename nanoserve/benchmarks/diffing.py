"""Is one report slower than another, beyond chance? Medians with bootstrap confidence intervals. No torch."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from nanoserve.errors import UsageError

RESAMPLES = 2000
CONFIDENCE = 0.95
HIGHER_IS_BETTER = ("output_tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s")


class Change(msgspec.Struct, frozen=True):
    """A metric of a case, after over before.

    Attributes:
        ratio: of the medians; low and high bound it with 95 % confidence.
        worse: by what share the later one is worse at least, with that confidence; 0 if it may be as good.
    """

    case: str
    metric: str
    before: float
    after: float
    ratio: float
    low: float
    high: float
    worse: float


def compare_reports(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Every metric with repeated samples that both reports hold for the same case.

    Raises:
        UsageError: if the reports are of different kinds or have no case in common.
    """
    if before["kind"] != after["kind"]:
        raise UsageError(f"one report is of bench {before['kind']}, the other of bench {after['kind']}")
    later = {row.get("case"): row.get("samples", {}) for row in after["rows"]}
    changes = [
        _change(row["case"], metric, samples, later[row["case"]][metric])
        for row in before["rows"]
        for metric, samples in row.get("samples", {}).items()
        if samples and later.get(row["case"], {}).get(metric)
    ]
    if not changes:
        raise UsageError("the reports have no case with repeated measurements in common")
    return changes


def _change(case: str, metric: str, before: Sequence[float], after: Sequence[float]) -> Change:
    first, second = np.array(before, dtype=np.float64), np.array(after, dtype=np.float64)
    low, high = bootstrap_ratio(first, second)
    worst_case = 1 - high if metric in HIGHER_IS_BETTER else low - 1
    medians = float(np.median(first)), float(np.median(second))
    return Change(case, metric, *medians, medians[1] / medians[0], low, high, worse=max(0.0, worst_case))


def bootstrap_ratio(before: "np.ndarray[Any, Any]", after: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Percentile bootstrap interval of median(after) / median(before) (Efron and Tibshirani 1993, chapter 13)."""
    generator = np.random.default_rng(0)
    drawn = [np.median(generator.choice(values, (RESAMPLES, len(values))), axis=1) for values in (before, after)]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn[1] / drawn[0], (tail, 100 - tail))
    return float(low), float(high)
