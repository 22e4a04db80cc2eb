"""``nanoserve bench diff``: is one report slower than another, beyond chance?"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nanoserve.commands.options import Options, argument, option
from nanoserve.commands.tables import columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.report import read_report
from nanoserve.lab.benchmarks.verdicts import spread_text

RESAMPLES, CONFIDENCE = 2000, 0.95
HIGHER_IS_BETTER = frozenset(
    [
        "output_tokens_per_s",
        "goodput_requests_per_s",
        "prefill_ratio",
        "decode_ratio",
        "output_ratio",
        "of_floor",
    ]
)  # all other metrics are durations
_COLUMNS = columns(
    ("", "case", "metric"),
    (",.2f", "before", "after"),
    (".3f", "ratio", "low", "high"),
    (".1%", ("worse by at least", "worse")),
)

Samples = dict[str, dict[str, list[float]]]  # case -> metric -> its repeated measurements


class DiffOptions(Options):
    before: Path = argument(..., "A report written with --json.")
    after: Path = argument(..., "A later report of the same benchmark.")
    threshold: float = option(
        0.05, "Exit with 1 if a metric is worse by this share.", metavar="X", minimum=0.0
    )


def run(options: DiffOptions) -> int | None:
    """Compares metrics that were measured repeatedly: latency, throughput and serve, the ratios of
    bench compare, the shares of the floor of bench operators, and the warm starts of bench startup.
    The exit code is 1 if a metric is worse by more than --threshold with 95 % confidence.

    [bold]Example[/bold]

      nanoserve bench diff before.json after.json --threshold 0.1
    """
    before, after = (read_report(path) for path in (options.before, options.after))
    if before["machine"] != after["machine"]:
        remark("the two reports come from different machines")
    changes = compare_reports(before, after)
    print_table(
        "after over before, 95 % intervals",
        _COLUMNS,
        [msgspec.to_builtins(change) for change in changes],
    )
    slower = [change for change in changes if change.worse > options.threshold]
    for change in slower:
        remark(f"{change.case}: {change.metric} is worse by at least {change.worse:.1%}")
    ratios = spread_text((change.ratio for change in changes), ".3f")
    worse = (
        f"{len(slower)} of {len(changes)} metrics are worse by more than {options.threshold:.0%}"
    )
    fewest = min(change.measurements for change in changes)
    print(
        f"After over before is {ratios}; {worse}, where at least {fewest} measurements of each "
        "count."
    )
    if not slower:
        return None
    return RuntimeFailure.exit_code


class Change(msgspec.Struct, frozen=True):
    case: str
    metric: str
    before: float
    after: float
    ratio: float  # of the medians; low and high bound it with 95 % confidence
    low: float
    high: float
    measurements: int  # the fewer of the two reports' measurements
    # share by which the later one is at least worse, with that confidence; 0 if it may be as good
    worse: float


class _Row(msgspec.Struct):
    case: str
    samples: dict[str, list[float]] = {}


class _Sampled(msgspec.Struct):
    rows: list[_Row]
    samples: Samples = {}  # those that were formed from several rows


def compare_reports(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Every metric with repeated measurements that both reports hold for the same case. Raises
    UsageError if they are of different kinds, hold no repeated measurements or have no case in
    common."""
    if before["kind"] != after["kind"]:
        raise UsageError(
            f"one report is of bench {before['kind']}, the other of bench {after['kind']}"
        )
    earlier, later = _repeated(before), _repeated(after)
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
    several = {
        case: {name: some for name, some in metrics.items() if len(some) > 1}
        for case, metrics in cases.items()
    }
    if not any(several.values()):
        raise UsageError(
            f"a report of bench {report['kind']} holds no repeated measurements to compare"
        )
    return several


def _change(case: str, metric: str, before: Sequence[float], after: Sequence[float]) -> Change:
    """The interval is the percentile bootstrap's of median(after) / median(before) (Efron and
    Tibshirani 1993, chapter 13)."""
    generator = np.random.default_rng(0)
    drawn = [
        np.median(generator.choice(values, (RESAMPLES, len(values))), axis=1)
        for values in (before, after)
    ]
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = map(float, np.percentile(drawn[1] / drawn[0], (tail, 100 - tail)))
    worst_case = low - 1
    if metric in HIGHER_IS_BETTER:
        worst_case = 1 - high
    medians = float(np.median(before)), float(np.median(after))
    fewest, worse = min(len(before), len(after)), max(0.0, worst_case)
    return Change(
        case, metric, *medians, medians[1] / medians[0], low, high, measurements=fewest, worse=worse
    )
