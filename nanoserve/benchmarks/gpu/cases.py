"""A part of the run is a list of cases; each becomes a row on disk as it ends, whatever becomes of the next one."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nanoserve.benchmarks.report import Report
from nanoserve.errors import NanoserveError

Measure = Callable[[], dict[str, Any]]
_LONGEST_REASON = 300


class CannotRun(Exception):
    """Something cannot do this work here, such as a peer that is not installed; the message says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to measure or to check, and how; `measure` gives the fields of its row."""

    name: str
    measure: Measure


def run_cases(
    cases: Iterable[Case],
    report: Report,
    *,
    seconds: float,
    device_works: Callable[[], bool],
    announce: Callable[[str], None],
) -> bool:
    """Measure what has no row yet; True if all of it has one now.

    The report says at any time which case is `running`. A case that fails has the reason as its row's `error`; once
    the budget of `seconds` is spent, the others are `skipped`. False means that the device no longer works, which
    only a new process can mend.
    """
    deadline = time.monotonic() + seconds
    known = {row["case"] for row in report.rows}
    for case in cases:
        if case.name in known:
            continue
        if time.monotonic() > deadline:
            report.add({"case": case.name, "skipped": "the time budget was spent"})
            continue
        announce(case.name)
        report.put("running", case.name)
        began = time.monotonic()
        fields = _measured(case)
        known.add(case.name)
        report.add({"case": case.name, "seconds": round(time.monotonic() - began, 2), **fields})
        if "error" in fields and not device_works():
            return False
    report.put("running", None)
    report.finish()
    return True


def _measured(case: Case) -> dict[str, Any]:
    try:
        return case.measure()
    except CannotRun as absence:
        return {"skipped": str(absence)}
    except Exception as error:  # whatever a kernel, a compiler or a peer fails with belongs to this case alone
        return {"error": reason(error)}


def reason(error: BaseException) -> str:
    """One line for a row."""
    text = " ".join(str(error).split())
    name = "" if isinstance(error, NanoserveError) else f"{type(error).__name__}: "
    return (name + text)[:_LONGEST_REASON]
