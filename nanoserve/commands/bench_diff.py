"""``nanoserve bench diff``: has a change made things slower?"""

from pathlib import Path

import msgspec

from nanoserve.benchmarks.diffing import compare_reports
from nanoserve.benchmarks.report import read_report
from nanoserve.benchmarks.tables import columns, print_table
from nanoserve.commands.options import Options, argument, option
from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure

_COLUMNS = columns(
    ("", "case", "metric"),
    (",.2f", "before", "after"),
    (".3f", "ratio", "low", "high"),
    (".1%", ("worse by at least", "worse")),
)


class DiffOptions(Options):
    """All options of the command."""

    before: Path = argument(..., "A report written with --json.")
    after: Path = argument(..., "A later report of the same benchmark.")
    threshold: float = option(0.05, "Exit with 1 if a metric is worse by this share.", metavar="X", minimum=0.0)


def run(options: DiffOptions) -> int | None:
    """What is compared is what was measured repeatedly: latency, throughput and serve, the ratios of bench compare, the
    shares of the floor of bench operators, and the warm starts of bench startup. The exit code is 1 if a metric is
    worse by more than --threshold with 95 % confidence.

    [bold]Example[/bold]

      nanoserve bench diff before.json after.json --threshold 0.1
    """
    reports = [read_report(path) for path in (options.before, options.after)]
    machines = [report["machine"] for report in reports]
    if machines[0] != machines[1]:
        remark("the two reports come from different machines")
    changes = compare_reports(*reports)
    print_table("after over before, 95 % intervals", _COLUMNS, [msgspec.to_builtins(change) for change in changes])
    slower = [change for change in changes if change.worse > options.threshold]
    for change in slower:
        remark(f"{change.case}: {change.metric} is worse by at least {change.worse:.1%}")
    return RuntimeFailure.exit_code if slower else None
