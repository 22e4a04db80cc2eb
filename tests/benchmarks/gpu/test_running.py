"""What was measured survives whatever happens to the process that measures."""

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

from nanoserve.benchmarks.gpu import running
from nanoserve.benchmarks.gpu.running import (
    CannotRun,
    GpuCase,
    open_part,
    part_file,
    read_results,
    run_cases,
    run_parts,
)
from nanoserve.benchmarks.report import Report, read_report
from nanoserve.errors import RuntimeFailure, UsageError

SETTINGS = {"dry_run": True}
BUDGETS = {"kernels": 600.0}
PATIENCE = 240.0


def measure_three(
    directory: Path, part: str, *, seconds: float, dry_run: bool, middle: Callable[[], dict[str, object]], delay: float
) -> bool:
    """Measure a part in a child."""
    report = open_part(directory, part, {"dry_run": dry_run})
    report.put("device", {"name": "none"})
    time.sleep(delay)
    return run(three(middle), report, seconds=seconds, works=False)


def three(middle: Callable[[], dict[str, object]]) -> list[GpuCase]:
    return [GpuCase("a", lambda: {"us": 1}), GpuCase("b", middle), GpuCase("c", lambda: {"us": 3})]


def run_three(
    tmp_path: Path,
    middle: Callable[[], dict[str, object]],
    *,
    budget: float = 600.0,
    case_seconds: float = 600.0,
    delay: float = 0.0,
) -> Path | None:
    """Run a part of three cases, of which `middle` is the second."""
    measure = partial(measure_three, middle=middle, delay=delay)
    budgets = {"kernels": budget}
    return run_parts(tmp_path, ["kernels"], budgets, dry_run=True, measure=measure, case_seconds=case_seconds)


def die() -> dict[str, object]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hang() -> dict[str, object]:
    time.sleep(600)
    return {}


def two() -> dict[str, object]:
    return {"us": 2}


def exit_at_once(*_: object, code: int, **__: object) -> bool:
    os._exit(code)


def end_with(*_: object, outcome: bool | type[BaseException], **__: object) -> bool:
    if isinstance(outcome, bool):
        return outcome
    raise outcome("no GPU")


def rows(tmp_path: Path) -> dict[str, dict[str, object]]:
    found = read_report(part_file(tmp_path, "kernels"))["rows"]
    assert len({row["case"] for row in found}) == len(found)
    return {row["case"]: row for row in found}


def fail() -> dict[str, object]:
    raise ValueError("two\nlines")


def absent() -> dict[str, object]:
    raise CannotRun("is not installed")


def run(cases: Sequence[GpuCase], report: Report, *, seconds: float = 60.0, works: bool = True) -> bool:
    return run_cases(cases, report, seconds=seconds, device_works=lambda: works, announce=lambda name: None)


def test_every_case_becomes_a_row_whatever_becomes_of_it(tmp_path: Path) -> None:
    report = open_part(tmp_path, "kernels", SETTINGS)
    cases = [GpuCase("good", lambda: {"us": 5}), GpuCase("bad", fail), GpuCase("absent", absent)]
    assert run(cases, report)
    found = rows(tmp_path)
    assert found["good"]["us"] == 5
    assert found["bad"]["error"] == "ValueError: two lines"
    assert found["absent"]["skipped"] == "is not installed"
    assert read_report(part_file(tmp_path, "kernels"))["complete"]


def test_a_spent_budget_skips_the_rest_and_another_run_measures_it(tmp_path: Path) -> None:
    cases = [GpuCase("one", lambda: {"us": 1}), GpuCase("two", lambda: {"us": 2})]
    assert run(cases[:1], open_part(tmp_path, "kernels", SETTINGS))
    assert run(cases, open_part(tmp_path, "kernels", SETTINGS), seconds=-1.0)
    assert "skipped" in rows(tmp_path)["two"]
    assert run([GpuCase("one", fail), cases[1]], open_part(tmp_path, "kernels", SETTINGS))
    assert {name: row["us"] for name, row in rows(tmp_path).items()} == {"one": 1, "two": 2}


def test_an_interrupted_part_keeps_its_rows_and_goes_on(tmp_path: Path) -> None:
    def interrupt() -> dict[str, object]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([GpuCase("one", lambda: {"us": 1}), GpuCase("two", interrupt)], open_part(tmp_path, "kernels", SETTINGS))
    assert list(rows(tmp_path)) == ["one"]
    assert run([GpuCase("one", fail), GpuCase("two", lambda: {"us": 2})], open_part(tmp_path, "kernels", SETTINGS))
    assert [row["us"] for row in rows(tmp_path).values()] == [1, 2]


def test_results_of_another_run_are_not_mixed(tmp_path: Path) -> None:
    open_part(tmp_path, "kernels", SETTINGS)
    with pytest.raises(UsageError, match=r"settings differ\); give another --out"):
        open_part(tmp_path, "kernels", {"dry_run": False})


def test_a_process_that_dies_costs_one_row(tmp_path: Path) -> None:
    together = run_three(tmp_path, die)
    found = rows(tmp_path)
    assert [found[case].get("us") for case in "abc"] == [1, None, 3]
    assert "exit code -11" in str(found["b"]["error"])
    assert together is not None
    assert len(read_results(together)["parts"]["kernels"]["rows"]) == 3


class LongNight:
    """A clock for the runner: while case b is measured, an hour passes between two looks, and else hardly any time."""

    def __init__(self, tmp_path: Path) -> None:
        self._part, self._ahead = part_file(tmp_path, "kernels"), 0.0

    def monotonic(self) -> float:
        if self._part.exists() and read_report(self._part).get("running") == "b":
            self._ahead += 3600.0
        return time.monotonic() + self._ahead


def test_a_case_that_hangs_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.benchmarks.gpu.running.time", LongNight(tmp_path))
    run_three(tmp_path, hang, budget=1e6)
    found = rows(tmp_path)
    assert [found[case].get("us") for case in "abc"] == [1, None, 3]
    assert found["b"]["error"] == "its process was ended: it took too long"


def test_the_budget_cuts_a_case_off_and_another_run_measures_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.benchmarks.gpu.running.time", LongNight(tmp_path))
    together = run_three(tmp_path, hang, case_seconds=1e9)
    monkeypatch.undo()
    found = rows(tmp_path)
    assert found["a"]["us"] == 1
    assert found["b"]["skipped"] == found["c"]["skipped"] == "the time budget was spent"
    assert together is not None
    part = read_results(together)["parts"]["kernels"]
    (note,) = part["notes"]
    assert part["complete"] and note.startswith("b: cut off after")
    run_three(tmp_path, two)
    assert [row["us"] for row in rows(tmp_path).values()] == [1, 2, 3]
    assert read_report(part_file(tmp_path, "kernels"))["notes"] == []


def test_a_process_may_take_longer_to_begin_than_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.benchmarks.gpu.running.OVERTIME_SECONDS", 0.0)
    run_three(tmp_path, two, delay=0.5, budget=0.0)
    assert [row["skipped"] for row in rows(tmp_path).values()] == ["the time budget was spent"] * 3


def test_to_begin_is_part_of_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoserve.benchmarks.gpu.setting import GpuSetting, find_setting  # imports torch, which no child here needs

    given = []

    def slow(*, dry_run: bool) -> GpuSetting:
        time.sleep(0.1)
        return find_setting(dry_run=dry_run)

    def run_none(*_: object, seconds: float, **__: object) -> bool:
        given.append(seconds)
        return True

    monkeypatch.setattr("nanoserve.benchmarks.gpu.setting.find_setting", slow)
    monkeypatch.setattr("nanoserve.benchmarks.gpu.running.run_cases", run_none)
    assert running.measure_part(tmp_path, "kernels", seconds=60.0, dry_run=True)
    assert given[0] <= 60.0 - 0.1


def test_a_device_that_is_lost_gets_a_new_process(tmp_path: Path) -> None:
    run_three(tmp_path, fail)
    found = rows(tmp_path)
    assert [found[case].get("us") for case in "abc"] == [1, None, 3]
    assert str(found["b"]["error"]).startswith("ValueError")


def test_a_part_that_cannot_begin_is_no_endless_loop(tmp_path: Path) -> None:
    broken = partial(exit_at_once, code=1)
    with pytest.raises(RuntimeFailure, match=r"kernels: .*exit code 1 outside of any case"):
        run_parts(tmp_path, ["kernels"], BUDGETS, dry_run=True, measure=broken)


@pytest.mark.parametrize("error", [UsageError, KeyboardInterrupt])
def test_a_worker_that_refuses_or_is_interrupted_ends_the_run(
    tmp_path: Path, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    ended = partial(end_with, outcome=error)
    with pytest.raises(error):
        run_parts(tmp_path, ["kernels", "engine"], {**BUDGETS, "engine": 60.0}, dry_run=True, measure=ended)
    assert capfd.readouterr().err == ("nanoserve: no GPU\n" if error is UsageError else "")
    assert read_report(part_file(tmp_path, "engine"))["rows"] == []


@pytest.mark.parametrize(("outcome", "code"), [(True, 0), (False, 4), (KeyboardInterrupt, 130), (UsageError, 2)])
def test_a_child_exits_with_what_became_of_it(
    outcome: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "0")  # the child sets it, and this test runs the child here
    with pytest.raises(SystemExit) as ended:
        running._run_child(partial(end_with, outcome=outcome), tmp_path, "kernels", seconds=12.5, dry_run=True)
    assert ended.value.code == code
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_child_cleans_up_after_ctrl_c_although_the_command_would_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def measure(*_: object, **__: object) -> bool:
        found.append(signal.getsignal(signal.SIGINT))
        return True

    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "0")
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        with pytest.raises(SystemExit):
            running._run_child(measure, tmp_path, "kernels", seconds=1.0, dry_run=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == [signal.default_int_handler]


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from tests.benchmarks.gpu.test_running import hang, run_three\n"
        f"run_three(Path({str(tmp_path)!r}), hang)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    path = part_file(tmp_path, "kernels")
    while not path.exists() or read_report(path).get("running") != "b":
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) != 0
    assert list(rows(tmp_path)) == ["a"]
    together = [path for path in tmp_path.glob("*.json") if path.name != "kernels.json"]
    assert [json.loads(path.read_text())["parts"]["kernels"]["complete"] for path in together] == [False]
