"""How much of a machine's memory is free."""

from pathlib import Path

import pytest

from nanoserve.utils import sizes
from nanoserve.utils.sizes import available_host_memory


def test_a_machine_may_have_no_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "_control_group_rooms", lambda *_: [])
    assert available_host_memory() > 1 << 20


def test_free_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal:       2000 kB\nMemFree:         100 kB\nMemAvailable:    700 kB\n"
    )
    assert sizes._free_memory(meminfo) == 700 * 1024
    assert sizes._free_memory(tmp_path / "absent") > 2**20


def test_control_groups_above_this_process_limit_it(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/outer/inner\n")
    groups = {"": "max", "outer": "1000", "outer/inner": "5000"}
    for name, limit in groups.items():
        group = tmp_path / "mount" / name
        group.mkdir(parents=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("600\n")
        (group / "memory.stat").write_text("anon 400\ninactive_file 150\n")
    assert sorted(sizes._control_group_rooms(membership, tmp_path / "mount")) == [550, 4550]


def test_the_older_control_groups_are_understood(tmp_path: Path) -> None:
    group = tmp_path / "memory"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text("900\n")
    (group / "memory.usage_in_bytes").write_text("950\n")
    (group / "memory.stat").write_text("total_inactive_file 20\n")
    assert sizes._control_group_rooms(tmp_path / "absent", tmp_path) == [0]
