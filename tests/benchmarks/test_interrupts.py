"""A benchmark whose process is killed half-way keeps what it has measured until then."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nanoserve.benchmarks.report import read_report
from nanoserve.errors import UsageError

ROOT = Path(__file__).parents[2]
# The bench command, except that it looks at the machine for no longer than a test may take.
PROGRAM = """
import nanoserve.benchmarks.local as local, nanoserve.benchmarks.roofline as roofline
roofline._PRODUCT_SIZES = (64,)
local.BandwidthProbe = lambda: roofline.BandwidthProbe(2**20)
from nanoserve.commands.main import run
run("bench")
"""
PATIENCE = 300.0


def _cases(report: Path) -> list[str]:
    try:
        rows: list[dict[str, Any]] = read_report(report)["rows"]
    except UsageError:
        return []
    return [row["case"] for row in rows]


def test_a_killed_benchmark_has_kept_what_it_had(tmp_path: Path) -> None:
    """``bench latency`` of a case that takes no time and one that takes seconds is killed when the first is measured.

    `test_commands` interrupts the same command by Ctrl-C, in the process.
    """
    report = tmp_path / "report.json"
    work = ["--batch-sizes", "1", "--lengths", "8+2,8+900", "--repeats", "3"]
    options = ["--kv-cache-memory", "16MiB", "--json", str(report)]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "latency", "--eager", *work, *options],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(tmp_path / "none")},  # no time for a compiler
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not _cases(report):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=PATIENCE)
    found = read_report(report)
    assert [row["case"] for row in found["rows"]] == ["1 x 8+2"]
    assert found["rows"][0]["steps"]["decode"]["steps"] == 3  # one after the first token, three times
    assert not found["complete"]
