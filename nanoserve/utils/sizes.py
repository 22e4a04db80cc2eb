"""Amounts of memory as people write them."""

import re
from decimal import Decimal

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
