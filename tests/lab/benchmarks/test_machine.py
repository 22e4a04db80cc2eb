"""Figures from the system, on files made for the purpose and on tiny measurements."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.lab.benchmarks import roofline
from nanoserve.lab.benchmarks.machine import ForeignLoad, command_line, installed_versions
from nanoserve.lab.benchmarks.roofline import BandwidthProbe, machine_limits
from nanoserve.lab.benchmarks.starting import (
    STAGES,
    drop_from_page_cache,
    mark_tokens,
    stage_lengths,
)
from nanoserve.request import CompletionOutput, RequestMetrics, RequestOutput

SIZES = roofline._PRODUCT_SIZES


def write_counters(proc: Path, busy: int, own: int) -> None:
    (proc / "stat").write_text(f"cpu  {busy} 0 0 5000 10 0 0 0 0 0\ncpu0 1 2 3\n")
    write_process(proc, os.getpid(), own)


def write_process(proc: Path, number: int, ticks: int, children: str = "") -> None:
    thread = proc / str(number) / "task" / str(number)
    thread.mkdir(parents=True, exist_ok=True)
    (proc / str(number) / "stat").write_text(
        f"1 (a (strange) name) S {' '.join(['0'] * 10)} {ticks} 0 0 0 20 0\n"
    )
    (thread / "children").write_text(children)


def test_foreign_load_is_all_but_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = iter([10.0, 12.0])
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.time.monotonic", lambda: next(seconds))
    write_counters(tmp_path, busy=0, own=0)
    load = ForeignLoad(proc=tmp_path)
    write_counters(tmp_path, busy=4 * ticks, own=1 * ticks)
    assert load.read() == pytest.approx(1.5)  # three seconds of others' work in two seconds


def test_the_work_of_descendants_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = iter([10.0, 12.0])
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.time.monotonic", lambda: next(seconds))
    write_counters(tmp_path, busy=0, own=0)
    load = ForeignLoad(proc=tmp_path)
    write_counters(tmp_path, busy=4 * ticks, own=0)
    write_process(tmp_path, os.getpid(), 0, children="-2 -3 ")  # numbers that no process has
    write_process(tmp_path, -2, ticks, children="-4 ")  # -3 has just ended
    write_process(tmp_path, -4, 2 * ticks)
    assert load.read() == pytest.approx(0.5)


def test_a_peer_that_has_died_does_not_hide_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = iter([10.0, 12.0])
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.time.monotonic", lambda: next(seconds))
    write_counters(tmp_path, busy=0, own=0)
    write_process(tmp_path, -2, 0)
    load = ForeignLoad([-2, -5], proc=tmp_path)  # -5 has died, and another was started in its place
    write_counters(tmp_path, busy=4 * ticks, own=1 * ticks)
    write_process(tmp_path, -2, 2 * ticks)
    assert load.read() == pytest.approx(0.5)


def test_a_key_does_not_get_into_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sys.argv",
        ["/x/nanoserve", "bench", "--api-key", "k1", "--api-key=k2", "--url", "u", "--api-key"],
    )
    assert command_line() == "nanoserve bench --api-key ... --api-key=... --url u --api-key"


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert ForeignLoad(proc=tmp_path).read() is None


@pytest.fixture(autouse=True)
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a product of 64 by 64 numbers, which takes no time."""
    monkeypatch.setattr("nanoserve.lab.benchmarks.roofline._PRODUCT_SIZES", (64,))


@pytest.mark.parametrize(("speed", "sizes"), [(1e9, [256, 512]), (1e11, [256, 512, 1024, 2048])])
def test_no_product_takes_long(
    speed: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that multiplies so fast: a call cannot be interrupted."""
    made: list[int] = []

    def timed(action: Any) -> float:
        size = action.args[0].shape[0]
        made.append(size)
        return 2 * size**3 / speed

    monkeypatch.setattr(roofline, "_PRODUCT_SIZES", SIZES)
    monkeypatch.setattr(roofline, "timed", timed)
    assert roofline._product_speed(torch.bfloat16) == pytest.approx(speed)
    assert made == sizes


def test_the_buffer_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    probe = BandwidthProbe(2**20)
    monkeypatch.setattr(roofline, "timed", lambda action: read.append(action().item()) or 0.5)
    assert probe.best() == 2**20 / (8 * 0.5)
    assert read[:8] == [2**15] * 8


def test_limits_are_the_best_ever_seen(tmp_path: Path) -> None:
    path, probe = tmp_path / "cache" / "limits.json", BandwidthProbe(2**20)
    first = machine_limits(torch.float32, probe, path)
    path.write_text(path.read_text().replace(repr(first.bytes_per_second), "9e15"))
    again = machine_limits(torch.float32, probe, path)
    assert again.bytes_per_second == 9e15
    assert again.operations_per_second >= first.operations_per_second


class SlowAtFirst:
    """A probe on a machine that is busy in all looks but one."""

    def __init__(self, *bests: float) -> None:
        self._bests = iter(bests)

    def best(self) -> float:
        return next(self._bests)


def test_one_quiet_look_is_enough(tmp_path: Path) -> None:
    probe: Any = SlowAtFirst(3e9, 9e9, 1e9, 2e9)
    assert machine_limits(torch.float32, probe, tmp_path / "limits.json").bytes_per_second == 9e9


def test_a_busy_first_run_is_replaced_by_a_quiet_one_and_not_the_other_way_round(
    tmp_path: Path,
) -> None:
    found = []
    for level in (3e9, 9e9, 4e9):
        probe: Any = SlowAtFirst(*[level] * 4)
        found.append(
            machine_limits(torch.float32, probe, tmp_path / "limits.json").bytes_per_second
        )
    assert found == [3e9, 9e9, 9e9]


def test_the_peak_is_that_of_the_faster_number_format(tmp_path: Path) -> None:
    path, probe = tmp_path / "limits.json", BandwidthProbe(2**20)
    machine_limits(torch.bfloat16, probe, path)
    known = json.loads(path.read_text())
    (entry,) = known.values()
    entry["float32"] = 9e15
    path.write_text(json.dumps(known))
    assert machine_limits(torch.bfloat16, probe, path).operations_per_second == 9e15


def test_each_number_format_has_its_own_peak(tmp_path: Path) -> None:
    path, probe = tmp_path / "limits.json", BandwidthProbe(2**20)
    for dtype in (torch.float32, torch.bfloat16):
        machine_limits(dtype, probe, path)
    (entry,) = json.loads(path.read_text()).values()
    assert set(entry) == {"read", "float32", "bfloat16"}


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"read": "x"}}'])
def test_a_broken_cache_is_measured_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "limits.json"
    path.write_text(content)
    assert machine_limits(torch.float32, BandwidthProbe(2**20), path).operations_per_second > 0


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        machine_limits(torch.float32, BandwidthProbe(2**20), tmp_path / "file" / "limits.json")
        is not None
    )


def test_stages_are_differences() -> None:
    marks = {name: float(place * place) for place, name in enumerate(STAGES, start=1)}
    assert list(stage_lengths(marks).values()) == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0, 17.0]


def output_of(*token_ids: int) -> RequestOutput:
    metrics = RequestMetrics(0.0, None, None, None, None, len(token_ids))
    completion = CompletionOutput(0, "", token_ids, None, None, None, metrics)
    return RequestOutput("request", None, (1, 2), [completion], finished=False)


@pytest.mark.parametrize(
    "parts", [((5,), (6,), (7,)), ((5,), (6, 7)), ((5, 6, 7),), ((), (5, 6, 7))]
)
def test_every_token_has_its_stage_also_where_two_come_together(
    parts: tuple[tuple[int, ...], ...],
) -> None:
    marked = list[str]()
    mark_tokens((output_of(*part) for part in parts), marked.append)
    assert marked == ["first token", "second token", "third token"]


def test_dropping_files_counts_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text("x")
    assert drop_from_page_cache([tmp_path, tmp_path / "none"]) == 1


def test_versions_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bench.py", "latency", "--json", "x"])
    assert command_line() == "bench.py latency --json x"
    assert "torch" in installed_versions()
