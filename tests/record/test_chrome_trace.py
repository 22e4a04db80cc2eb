"""A trace file names its tracks, and can be read wherever it ends."""

import json
from pathlib import Path

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.record.chrome_trace import ChromeTraceFile, Track


def test_tracks_are_named_before_their_first_bar(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceFile(path) as file:
        file.bar(Track("workers", "stage 0"), "compute", 0.5, 0.75, {"step": 3})
        file.counter("scheduler", "tokens", 0.25, {"decodes": 2, "prompt tokens": 5})
        file.bar(Track("workers", "stage 0"), "send", 0.75, 1.0)
    events = json.loads(path.read_text())
    assert [(event["name"], event["args"]) for event in events if event["ph"] == "M"] == [
        ("process_name", {"name": "workers"}),
        ("process_sort_index", {"sort_index": 0}),
        ("thread_name", {"name": "stage 0"}),
        ("process_name", {"name": "scheduler"}),
        ("process_sort_index", {"sort_index": 1}),
    ]
    compute, counter, send = (event for event in events if event["ph"] != "M")
    assert (compute["ts"], compute["dur"], compute["args"]) == (500_000, 250_000, {"step": 3})
    assert (compute["pid"], compute["tid"]) == (send["pid"], send["tid"])
    assert (counter["ph"], counter["ts"], counter["args"]) == (
        "C",
        250_000,
        {"decodes": 2, "prompt tokens": 5},
    )


def test_what_was_flushed_can_be_read_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    file = ChromeTraceFile(path)
    file.bar(Track("workers", "stage 0"), "compute", 0.0, 1.0)
    file.flush()
    assert json.loads(path.read_text() + "]")[-1]["name"] == "compute"
    file.close()
    file.close()
    assert json.loads(path.read_text())[-1]["name"] == "compute"


def test_an_empty_trace_is_an_empty_array(tmp_path: Path) -> None:
    ChromeTraceFile(tmp_path / "trace.json").close()
    assert json.loads((tmp_path / "trace.json").read_text()) == []


def test_a_file_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeFailure, match=r"cannot write .*/none/trace.json: No such file or directory"
    ):
        ChromeTraceFile(tmp_path / "none" / "trace.json")
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no full device to write to")
    file = ChromeTraceFile(full)
    file.bar(Track("workers", "stage 0"), "compute", 0.0, 1.0)
    with pytest.raises(RuntimeFailure, match="cannot write /dev/full: No space left on device"):
        file.close()
