"""Contents of a report, and the line about files that are none."""

import json
from pathlib import Path

import pytest

from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.report import Report, read_report


def test_rows_are_on_disk_as_soon_as_they_are_added(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = Report("latency", {"repeats": 3}, path)
    report.add({"case": "a"})
    found = read_report(path)
    assert (found["rows"], found["complete"], found["settings"]) == (
        [{"case": "a"}],
        False,
        {"repeats": 3},
    )
    report.finish()
    assert read_report(path)["complete"]
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_the_head_says_where_and_with_what(tmp_path: Path) -> None:
    found = Report("latency", {}, None).document
    assert found["machine"]["cores"] >= 1
    assert {"nanoserve", "python", "torch"} <= set(found["versions"])
    assert {"started", "command", "commit"} <= set(found)


def test_a_file_that_cannot_be_written_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"cannot write .*missing"):
        Report("latency", {}, tmp_path / "missing" / "report.json")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"schema": "other"}', '{"schema": "nanoserve-bench/1"}']
)
def test_a_file_that_is_no_report(tmp_path: Path, content: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"report\.json is not"):
        read_report(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_report(tmp_path / "none.json")


def test_a_report_is_json_that_everyone_reads(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    Report("latency", {}, path).put("engine", {"model": "é"})
    assert json.loads(path.read_bytes())["engine"] == {"model": "é"}
