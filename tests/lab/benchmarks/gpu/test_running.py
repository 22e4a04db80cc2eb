"""Measured rows survive whatever happens to the process that measures."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.gpu import running
from nanoserve.lab.benchmarks.gpu.cases import CannotRun, GpuCase, Row
from nanoserve.lab.benchmarks.gpu.running import PartRun, open_part, read_results, run_parts
from nanoserve.lab.benchmarks.report import Report, read_report

BUDGETS = {"kernels": 1e6, "engine": 60.0}
PATIENCE = 600.0


def measure_three(run: PartRun, *, middle: Callable[[], Row], delay: float) -> bool:
    """Measure a part in a child, on a device that works no more once a case has failed."""
    run.put("device", {"name": "none"})
    time.sleep(delay)
    cases = [GpuCase("a", lambda: {"us": 1}), GpuCase("b", middle), GpuCase("c", lambda: {"us": 3})]
    return run.measure(cases, lambda: False)


def run_three(
    tmp_path: Path, middle: Callable[[], Row], *, budget: float = 1e6, delay: float = 0.0
) -> Path:
    """Run a part of three cases, of which `middle` is the second."""
    measure = partial(measure_three, middle=middle, delay=delay)
    return run_parts(tmp_path, ["kernels"], {"kernels": budget}, dry_run=True, measure=measure)


def die() -> Row:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hang(begun: Path) -> Row:
    begun.touch()
    time.sleep(600)
    return {}


def two() -> Row:
    return {"us": 2}


def fail() -> Row:
    raise ValueError("two\nlines")


def absent() -> Row:
    raise CannotRun("is not installed")


def interrupt() -> Row:
    raise KeyboardInterrupt


def exit_at_once(run: PartRun) -> bool:
    os._exit(1)


def end_with(run: PartRun, *, error: type[BaseException]) -> bool:
    raise error("no GPU")


def rows(tmp_path: Path) -> dict[str, Row]:
    found = read_report(tmp_path / "kernels.json")["rows"]
    assert len({row["case"] for row in found}) == len(found)
    return {row["case"]: row for row in found}


class ReportPipe:
    """Writes what a child sends, as its parent does."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def send(self, message: tuple[str, Any]) -> None:
        name, value = message
        if name == "row":
            self._report.add(value)
        else:
            self._report.put(name, value)


def measure_here(tmp_path: Path, cases: Sequence[GpuCase], *, seconds: float = 60.0) -> bool:
    """Go on with a part in this process."""
    report = open_part(tmp_path, "kernels", dry_run=True)
    pipe: Any = ReportPipe(report)
    return PartRun("kernels", True, time.monotonic() + seconds, list(report.rows), pipe).measure(
        cases, lambda: True
    )


def test_every_case_becomes_a_row_whatever_becomes_of_it(tmp_path: Path) -> None:
    cases = [GpuCase("good", lambda: {"us": 5}), GpuCase("bad", fail), GpuCase("absent", absent)]
    assert measure_here(tmp_path, cases)
    found = rows(tmp_path)
    assert found["good"]["us"] == 5
    assert found["bad"]["error"] == "ValueError: two lines"
    assert found["absent"]["skipped"] == "is not installed"


def test_a_spent_budget_skips_the_rest_and_another_run_measures_it(tmp_path: Path) -> None:
    cases = [GpuCase("one", lambda: {"us": 1}), GpuCase("two", two)]
    assert measure_here(tmp_path, cases[:1])
    assert measure_here(tmp_path, cases, seconds=-1.0)
    assert "skipped" in rows(tmp_path)["two"]
    assert measure_here(tmp_path, [GpuCase("one", fail), cases[1]])
    assert {name: row["us"] for name, row in rows(tmp_path).items()} == {"one": 1, "two": 2}


def test_an_interrupted_part_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure_here(tmp_path, [GpuCase("one", lambda: {"us": 1}), GpuCase("two", interrupt)])
    assert list(rows(tmp_path)) == ["one"]
    assert measure_here(tmp_path, [GpuCase("one", fail), GpuCase("two", two)])
    assert [row["us"] for row in rows(tmp_path).values()] == [1, 2]


def test_results_of_another_run_are_not_mixed(tmp_path: Path) -> None:
    open_part(tmp_path, "kernels", dry_run=True)
    with pytest.raises(UsageError, match=r"settings differ\); give another --out"):
        open_part(tmp_path, "kernels", dry_run=False)


def test_a_process_that_dies_costs_one_row(tmp_path: Path) -> None:
    together = run_three(tmp_path, die)
    found = rows(tmp_path)
    assert [found[case].get("us") for case in "abc"] == [1, None, 3]
    assert found["b"]["error"] == "its process died (exit code -11)"
    part = read_results(together)["parts"]["kernels"]
    assert part["complete"] and part["device"] == {"name": "none"}
    assert len(part["rows"]) == 3


class LongNight:
    """A clock for the parent: while case b hangs, an hour passes between two looks, and else hardly
    any time."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path, self._ahead = tmp_path, 0.0

    def monotonic(self) -> float:
        if (self._tmp_path / "begun").exists() and "b" not in rows(self._tmp_path):
            self._ahead += 3600.0
        return time.monotonic() + self._ahead


def test_a_case_that_hangs_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.running.time", LongNight(tmp_path))
    run_three(tmp_path, partial(hang, tmp_path / "begun"))
    found = rows(tmp_path)
    assert [found[case].get("us") for case in "abc"] == [1, None, 3]
    assert found["b"]["error"] == "its process was ended: it took too long"


def test_the_budget_cuts_a_case_off_and_another_run_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.running.CASE_SECONDS", 1e9)
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.running.time", LongNight(tmp_path))
    part = read_results(run_three(tmp_path, partial(hang, tmp_path / "begun"), budget=600.0))[
        "parts"
    ]["kernels"]
    monkeypatch.undo()
    assert part["complete"]
    found = rows(tmp_path)
    assert found["a"]["us"] == 1
    assert str(found["b"]["skipped"]).startswith("cut off after 36")
    run_three(tmp_path, two)
    assert {case: row["us"] for case, row in rows(tmp_path).items()} == {"a": 1, "b": 2, "c": 3}


def test_to_begin_is_part_of_the_budget_and_may_take_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.lab.benchmarks.gpu.running.OVERTIME_SECONDS", 0.0)
    run_three(tmp_path, two, delay=0.5, budget=0.25)
    assert [row["skipped"] for row in rows(tmp_path).values()] == ["the time budget was spent"] * 3


def test_a_device_that_is_lost_gets_a_new_process(tmp_path: Path) -> None:
    run_three(tmp_path, fail)
    found = rows(tmp_path)
    assert [found[case].get("us") for case in "abc"] == [1, None, 3]
    assert str(found["b"]["error"]).startswith("ValueError")


def test_a_part_that_cannot_begin_is_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeFailure, match=r"kernels: no case was begun: its process died \(exit code 1\)"
    ):
        run_parts(tmp_path, ["kernels"], BUDGETS, dry_run=True, measure=exit_at_once)


@pytest.mark.parametrize("error", [UsageError, KeyboardInterrupt])
def test_a_child_that_refuses_or_is_interrupted_ends_the_run(
    tmp_path: Path, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match="no GPU"):
        run_parts(
            tmp_path,
            ["kernels", "engine"],
            BUDGETS,
            dry_run=True,
            measure=partial(end_with, error=error),
        )
    assert capfd.readouterr().err == ""
    assert read_report(tmp_path / "engine.json")["rows"] == []


def test_a_part_that_fails_lets_the_others_run(tmp_path: Path) -> None:
    measure = partial(end_with, error=RuntimeFailure)
    with pytest.raises(RuntimeFailure, match=r"^kernels: no GPU; engine: no GPU$"):
        run_parts(tmp_path, ["kernels", "engine"], BUDGETS, dry_run=True, measure=measure)


def test_a_child_cleans_up_after_ctrl_c_although_the_command_would_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []

    def measure(run: PartRun) -> bool:
        found.append((signal.getsignal(signal.SIGINT), os.environ["HF_HUB_OFFLINE"]))
        return False

    # the child sets it, and this test runs the child here
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "0")
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        pipe: Any = None
        running._run_child(measure, PartRun("kernels", True, 1.0, [], pipe))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [(signal.default_int_handler, "1")]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    program = (
        "from functools import partial; from pathlib import Path\n"
        "from tests.lab.benchmarks.gpu.test_running import hang, run_three\n"
        f"out = Path({str(tmp_path)!r}); run_three(out, partial(hang, out / 'begun'))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    # the parent may still be writing the first row
    while not (tmp_path / "begun").exists() or not rows(tmp_path):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) != 0
    assert list(rows(tmp_path)) == ["a"]
    together = [path for path in tmp_path.glob("*.json") if path.name != "kernels.json"]
    assert [json.loads(path.read_text())["parts"]["kernels"]["complete"] for path in together] == [
        False
    ]
