"""How much of the processor others used meanwhile: a figure measured beside a busy neighbour is worth less."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # idle and iowait of /proc/stat's cpu line
_LAST_BUSY_FIELD = 8  # behind it come guest times, which are counted in user time already


class ForeignLoad:
    """Measures, from its creation or last reading on, how many cores other processes kept busy.

    Own work is that of this process, of those with the ids in ``own``, and of all their descendants.
    """

    def __init__(self, own: Sequence[int] = (), proc: Path = _PROC) -> None:
        self._own = (os.getpid(), *own)
        self._proc = proc
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._before = self._read()

    def read(self) -> float | None:
        """Cores kept busy by others since the last reading, 0.0 and up; None where the kernel does not tell."""
        before, self._before = self._before, self._read()
        if before is None or self._before is None:
            return None
        seconds, busy, own = (now - then for now, then in zip(self._before, before, strict=True))
        return max(0.0, (busy - own) / self._ticks / seconds) if seconds > 0 else None

    def _read(self) -> tuple[float, int, int] | None:
        """(time, busy ticks of all processes, busy ticks of ours)"""
        try:
            fields = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
            counted = [int(field) for field in fields[:_LAST_BUSY_FIELD]]
            busy = sum(ticks for index, ticks in enumerate(counted) if index not in _IDLE_FIELDS)
            own = sum(map(self._process_ticks, self._own))
        except (OSError, ValueError, IndexError):
            return None
        for process in self._descendants():
            with suppress(OSError):  # it has ended: its ticks now count with the process that waited for it
                own += self._process_ticks(process)
        return time.monotonic(), busy, own

    def _descendants(self) -> set[int]:
        found, pending = set(self._own), list(self._own)
        while pending:
            for file in (self._proc / str(pending.pop()) / "task").glob("*/children"):
                with suppress(OSError):  # a thread that has just ended
                    children = set(map(int, file.read_text().split())) - found
                    found |= children
                    pending += children
        return found - set(self._own)

    def _process_ticks(self, process: int) -> int:
        # The name, in brackets, may hold blanks: the fields count from behind it.
        fields = (self._proc / str(process) / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))  # its own time, and that of children it has waited for
