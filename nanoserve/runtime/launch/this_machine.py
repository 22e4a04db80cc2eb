"""What kind of machine this is, for what was measured on it; no torch."""

import platform
from functools import cache
from pathlib import Path


@cache
def processor() -> tuple[str, frozenset[str]]:
    """Its name, and what it says it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features", "")
    return fields.get("model name", platform.machine()), frozenset(flags.split())
