"""Measures one part in a process of its own; its exit codes are those of `results`.

``python -m nanoserve.benchmarks.gpu.worker DIR PART SECONDS [--dry-run]``
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.benchmarks.floors import Limits
from nanoserve.benchmarks.gpu.results import (
    EXIT_DEVICE_LOST,
    EXIT_INTERRUPTED,
    EXIT_OK,
    PARTS,
    TUNING,
    GpuCase,
    open_part,
    run_cases,
)
from nanoserve.benchmarks.report import Report
from nanoserve.errors import NanoserveError

if TYPE_CHECKING:
    from nanoserve.benchmarks.gpu.setting import GpuSetting


def main() -> int:
    """Read the command line, measure, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("part", choices=(*PARTS, TUNING))
    parser.add_argument("seconds", type=float)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    try:
        done = measure_part(asked.directory, asked.part, seconds=asked.seconds, dry_run=asked.dry_run)
    except NanoserveError as error:
        print(f"nanoserve: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK if done else EXIT_DEVICE_LOST


def measure_part(directory: Path, part: str, *, seconds: float, dry_run: bool) -> bool:
    """Go on with a part until all of its cases have rows, or until its budget is spent; False if the device failed.

    The budget of `seconds` begins here: to import torch, to open the device and to measure its limits is part of it.

    Raises:
        UsageError: without a GPU, or if the directory holds something else.
        RuntimeFailure: if the rows cannot be written.
    """
    began = time.monotonic()
    from nanoserve.benchmarks.gpu.setting import find_setting

    setting = find_setting(dry_run=dry_run)
    report = open_part(directory, part, {"dry_run": dry_run})
    report.put("device", setting.facts())
    with _PARTS[part](setting, report) as cases:
        return run_cases(
            cases,
            report,
            seconds=seconds - (time.monotonic() - began),
            device_works=setting.give_back,
            announce=lambda name: print(f"{part}: {name}", file=sys.stderr, flush=True),
        )


@contextmanager
def _correctness(setting: "GpuSetting", report: Report) -> Iterator[Iterable[GpuCase]]:
    from nanoserve.benchmarks.gpu.engines import EngineShelf
    from nanoserve.benchmarks.gpu.model_checks import CHECKED, engine_check_cases, model_cases
    from nanoserve.benchmarks.gpu.operator_checks import operator_cases
    from nanoserve.benchmarks.gpu.sampling_checks import sampling_cases

    with EngineShelf(setting) as shelf:
        yield chain(  # Triton compiles so much for the operators that the budget may end there
            engine_check_cases(shelf, CHECKED[:1]),
            sampling_cases(setting),
            operator_cases(setting),
            model_cases(setting),
            engine_check_cases(shelf, () if setting.dry_run else CHECKED[1:]),
        )


@contextmanager
def _kernels(setting: "GpuSetting", report: Report) -> Iterator[Iterable[GpuCase]]:
    from nanoserve.benchmarks.gpu.kernels import KernelBench, kernel_cases

    yield kernel_cases(KernelBench.on(setting, _limits(setting, report)))


@contextmanager
def _engine(setting: "GpuSetting", report: Report) -> Iterator[Iterable[GpuCase]]:
    from nanoserve.benchmarks.gpu.engine_rows import EngineBench, engine_cases
    from nanoserve.benchmarks.gpu.engines import EngineShelf

    with EngineShelf(setting) as shelf:
        yield engine_cases(EngineBench(setting, _limits(setting, report), shelf))


@contextmanager
def _tuning(setting: "GpuSetting", report: Report) -> Iterator[Iterable[GpuCase]]:
    from nanoserve.benchmarks.gpu.kernels import KernelBench
    from nanoserve.benchmarks.gpu.tuning import Tuner, write_table

    try:
        yield Tuner(KernelBench.on(setting, _limits(setting, report)), report.rows).cases()
    finally:
        write_table(report)


def _limits(setting: "GpuSetting", report: Report) -> Limits:
    from nanoserve.benchmarks.gpu.timing import limit_fields, measure_limits

    limits = measure_limits(setting)
    report.put("limits", limit_fields(limits))
    return limits


# A part imports what it needs when it begins: the kernels can be timed where the engine's packages are missing.
_PARTS = {"correctness": _correctness, "kernels": _kernels, "engine": _engine, TUNING: _tuning}


if __name__ == "__main__":
    sys.exit(main())
