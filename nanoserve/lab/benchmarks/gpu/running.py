"""The parts of ``bench gpu``, each measured by child processes: a case that hangs or dies costs one
row.

A child sends its rows through a pipe, and the parent writes each at once. Where a child ends early,
another goes on.
"""

import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.gpu.cases import CannotRun, GpuCase, Row, reason
from nanoserve.lab.benchmarks.report import Report, read_report
from nanoserve.utils.files import replace_file

PARTS = ("correctness", "kernels", "engine")
TUNING = "tuning"  # a part that is run alone, and whose rows are no results
SCHEMA = "nanoserve-gpu/1"

BUDGETS: Mapping[str, float] = {
    "correctness": 130.0,
    "kernels": 70.0,
    "engine": 230.0,
    TUNING: 480.0,
}
"""Seconds of each part; without tuning, and with every part's overtime, together less than eight
minutes."""
CASE_SECONDS = 200.0
"""The longest that one case may take before its process is ended: compilers and other engines need
most of it."""
OVERTIME_SECONDS = 15.0  # the longest that a case may go on after the end of its part's budget
BUDGET_SPENT = "the time budget was spent"
_POLL_SECONDS = 0.2
_FAREWELL_SECONDS = 20.0

Document = Mapping[str, Any]


def open_part(directory: Path, part: str, *, dry_run: bool) -> Report:
    """The report of a part, which goes on where an earlier run ended: cases that it skipped are not
    done yet. Raises UsageError if the directory holds the part of another commit or of other
    settings, as their cases would not mix."""
    path = directory / f"{part}.json"
    report = Report(f"gpu {part}", {"dry_run": dry_run}, None)
    if path.exists():
        earlier = read_report(path)
        different = [
            name
            for name in ("kind", "commit", "settings")
            if earlier.get(name) != report.document[name]
        ]
        if different:
            raise UsageError(
                f"{path} holds results of another run ({', '.join(different)} differ); give "
                "another --out"
            )
        report.rows += [row for row in earlier["rows"] if "skipped" not in row]
        report.document |= earlier | {"rows": report.rows}
    report.path = path
    report.put("complete", False)
    return report


def read_results(path: Path) -> dict[str, Any]:
    """The parts' files of a directory together, or a file in which they were put together;
    UsageError if there are none."""
    if not path.is_dir():
        return read_report(path, schema=SCHEMA, content="a result of nanoserve bench gpu")
    files = {part: path / f"{part}.json" for part in PARTS}
    parts = {part: read_report(file) for part, file in files.items() if file.exists()}
    if not parts:
        raise UsageError(f"{path} holds none of {', '.join(f'{part}.json' for part in PARTS)}")
    first = next(iter(parts.values()))
    return {
        "schema": SCHEMA,
        "dry_run": any(document["settings"]["dry_run"] for document in parts.values()),
        "device": first.get("device", {}),
        "date": first["started"][:10],
        "commit": first["commit"],
        "versions": first["versions"],
        "parts": parts,
    }


def write_together(directory: Path) -> Path:
    """Put the parts' files of a directory together as `<gpu>-<date>.json`, beside them."""
    results = read_results(directory)
    device = results["device"].get("name", "gpu")
    if results["dry_run"]:
        device = "dry-run"
    slug = "-".join(re.findall(r"[^\W_]+", device.lower()))
    path = directory / f"{slug}-{results['date']}.json"
    replace_file(path, json.dumps(results, indent=1) + "\n")
    return path


@dataclass(frozen=True, slots=True)
class PartRun:
    """A child's view of its part."""

    part: str
    dry_run: bool
    deadline: float  # the end of the part's budget, as time.monotonic tells it in every process
    rows: list[Row]  # what is known, also from earlier children
    pipe: Connection

    def put(self, name: str, value: Any) -> None:
        self.pipe.send((name, value))

    def measure(self, cases: Iterable[GpuCase], device_works: Callable[[], bool]) -> bool:
        """Measure what has no row yet. False means that the device works no more, and that a new
        process can go on. A case that fails has the reason as its row's `error`; once the budget is
        spent, the others are `skipped`."""
        known = {row["case"] for row in self.rows}
        for case in cases:
            if case.name in known:
                continue
            known.add(case.name)
            fields: Row = {"skipped": BUDGET_SPENT}
            if time.monotonic() <= self.deadline:
                print(f"{self.part}: {case.name}", file=sys.stderr, flush=True)
                self.put("running", case.name)
                began = time.monotonic()
                try:
                    fields = case.measure()
                except CannotRun as absence:
                    fields = {"skipped": str(absence)}
                # a failing kernel, compiler or peer costs this case alone
                except Exception as error:
                    fields = {"error": reason(error)}
                fields = {"seconds": round(time.monotonic() - began, 2), **fields}
            self.rows.append(msgspec.to_builtins({"case": case.name, **fields}))
            self.put("row", self.rows[-1])
            if "error" in fields and not device_works():
                return False
        return True


def measure_part(run: PartRun) -> bool:
    """Measure a part in this process; False if the device failed. Raises UsageError without a GPU.
    Each part has a module of its own, so that kernels can be timed where the engine's packages are
    missing."""
    # imports torch, which the parent does without
    from nanoserve.lab.benchmarks.gpu.device import GpuBench

    bench = GpuBench.open(dry_run=run.dry_run)
    run.put("device", bench.facts())
    if run.part != "correctness":
        limits = bench.limits
        fields = {
            "copy_gb_per_s": limits.bytes_per_second / 1e9,
            "matmul_tflops": limits.operations_per_second / 1e12,
        }
        run.put("limits", fields)
    part = import_module(f"nanoserve.lab.benchmarks.gpu.{run.part}")
    with closing(part.part_cases(bench, run.rows)) as cases:
        return run.measure(cases, bench.give_back)


Measure = Callable[[PartRun], bool]


def _run_child(measure: Measure, run: PartRun) -> None:
    """The child: measure, and tell the parent what became of it."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # The command's module, which a child imports too, ends a process without the clean-up that
        # Ctrl-C needs here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HF_HUB_OFFLINE"] = "1"  # or transformers asks a hub for kernels, again and again
    try:
        if measure(run):
            run.put("complete", True)
    except (NanoserveError, KeyboardInterrupt) as error:
        run.put("failed", error)


def run_parts(
    directory: Path,
    parts: Sequence[str],
    budgets: Mapping[str, float],
    *,
    dry_run: bool,
    measure: Measure = measure_part,
) -> Path:
    """Run the parts one after another, each by `measure` in child processes; returns the file of
    all results, or the table that was tuned. Raises UsageError if the directory holds results of
    another run, before anything is measured, or if a child refuses to begin; RuntimeFailure, after
    the other parts, if a part can begin no case."""
    reports = {part: open_part(directory, part, dry_run=dry_run) for part in parts}
    failures = []
    try:
        for part, report in reports.items():
            deadline = time.monotonic() + budgets[part]
            try:
                while not _go_on(report, part, deadline, measure, dry_run=dry_run):
                    pass
            except RuntimeFailure as failure:
                failures.append(f"{part}: {failure}")
    finally:
        if TUNING in reports:
            from nanoserve.lab.benchmarks.gpu.tuning import write_table  # imports torch

            written = write_table(directory, reports[TUNING].rows)
        else:
            written = write_together(directory)
    if failures:
        raise RuntimeFailure("; ".join(failures))
    return written


def _go_on(report: Report, part: str, deadline: float, measure: Measure, *, dry_run: bool) -> bool:
    """Write what a new child measures. True if the part is complete; False if another child has to
    go on."""
    context = multiprocessing.get_context("spawn")
    pipe, sending = context.Pipe(duplex=False)
    run = PartRun(part, dry_run, deadline, report.rows, sending)
    process = context.Process(target=_run_child, args=(measure, run))
    process.start()
    sending.close()
    known, case, began = len(report.rows), None, time.monotonic()
    try:
        while True:
            if pipe.poll(_POLL_SECONDS):
                name, value = pipe.recv()
                began = time.monotonic()
                case = None
                if name == "running":
                    case = value
                if name in ("complete", "failed"):
                    process.join(_FAREWELL_SECONDS)
                if name == "failed":
                    raise value
                if name == "row":
                    report.add(value)
                elif case is None:
                    report.put(name, value)
                if name == "complete":
                    return True
            elif process.exitcode is not None and not pipe.poll():
                raise EOFError  # a process that the child left behind keeps the pipe open
            elif (now := time.monotonic()) > began + CASE_SECONDS:
                fields = {"error": "its process was ended: it took too long"}
                break
            elif case is not None and now > deadline + OVERTIME_SECONDS:
                fields = {"skipped": f"cut off after {now - began:.0f} s, as {BUDGET_SPENT}"}
                break
    except EOFError:
        process.join(_FAREWELL_SECONDS)
        fields = {"error": f"its process died (exit code {process.exitcode})"}
    except KeyboardInterrupt:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
        process.join(_FAREWELL_SECONDS)
        with suppress(EOFError):  # keep the rows that it has sent
            while pipe.poll():
                name, value = pipe.recv()
                if name == "row":
                    report.add(value)
        raise
    finally:
        # without effect on one that ended; and a kernel that hangs hears nothing gentler
        process.kill()
        process.join()
    if case is not None:
        report.add({"case": case, **fields})
    elif len(report.rows) == known:
        raise RuntimeFailure(f"no case was begun: {fields['error']}")
    return False
