"""Amounts of memory: as people write them, and how much of this machine's is free."""

import os
import re
from decimal import Decimal
from pathlib import Path

from nanoserve.errors import UsageError, shown

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = 1024**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[f"{_letter}b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(size: str | int) -> int:
    """The bytes that "512MiB", "2GB" (10^9 each), "1g" (2^30, as in docker), "1.5 GiB" or a plain
    number mean.

    Raises UsageError if it is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(str(size))
    unit = None
    if match:
        unit = _UNITS.get(match[2].lower())
    if match is None or unit is None or len(match[1]) > 30:
        raise UsageError(f"{shown(str(size), 60)} is not a size; write it like 512MiB, 2GB or 1.5g")
    number = int(Decimal(match[1]) * unit)
    if number < 1:
        raise UsageError(f"a size must be at least one byte, not {shown(size)}")
    return number


def format_size(number: int) -> str:
    """Bytes for people, in binary units: "1.5 GiB". Rounded up, so that a size reported as needed
    is enough."""
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        size = 1024**power
        if number >= size:
            tenths = -(-number * 10 // size)  # rounded up
            return f"{tenths / 10:.1f} {unit}"
    return f"{number} B"


def available_host_memory() -> int:
    """Bytes that can still be allocated, within what the control group of this process allows."""
    limits = _control_group_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    limits.append(_free_memory(Path("/proc/meminfo")))
    return min(limits)


def _free_memory(meminfo: Path) -> int:
    """The kernel's estimate of what can be used without swapping; without /proc (macOS), the
    physical memory."""
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_group_rooms(membership: Path, mount: Path) -> list[int]:
    """Bytes left in each control group above this process that has a limit (cgroup version 2, then
    version 1)."""
    own = mount
    if membership.is_file():
        for line in membership.read_text().splitlines():
            if line.startswith("0::"):
                path = line.removeprefix("0::").strip()
                own = mount / path.lstrip("/")
    rooms = [
        _room(
            mount / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )
    ]
    for group in (own, *own.parents):
        if group.is_relative_to(mount):
            rooms.append(_room(group, "memory.max", "memory.current", "inactive_file"))
    return [room for room in rooms if room is not None]


def _room(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Limit minus usage, where usage leaves out file cache that the kernel drops when memory is
    short."""
    try:
        allowed = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        statistics = (group / "memory.stat").read_text().splitlines()
        values = dict(line.split(maxsplit=1) for line in statistics)
        if allowed == "max":
            return None
        file_cache = int(values.get(reclaimable, "0"))
        return max(0, int(allowed) - used + file_cache)
    except (OSError, ValueError):
        return None
