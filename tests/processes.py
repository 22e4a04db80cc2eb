"""Finding processes that a test has started, wherever they are and whoever their parent is now."""

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "NANOSERVE_TEST_MARK"
"""An environment variable: whatever a marked process starts has the same mark."""
_WORKER = b"nanoserve.executor.workers.process"


def new_mark() -> str:
    """One that no other test has."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """All processes with that mark but this one, the oldest first; none that is dead and only not
    yet waited for."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            after_name = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            state, started = after_name[0], int(after_name[19])
            if state != "Z" and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(
                b"\0"
            ):
                found.append((started, int(entry.name)))
    return [process for _, process in sorted(found)]


def wait_for_processes(mark: str, count: int) -> None:
    """Wait until there are so many processes with that mark, for longer than any machine takes."""
    deadline = time.monotonic() + 240
    while len(marked(mark)) != count:
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.01)


def workers(mark: str) -> list[int]:
    """The worker processes with that mark, by their number on this machine."""
    lines = {process: _command_line(process) for process in marked(mark)}
    numbers = {
        process: int(line.split(b"\0")[-2]) for process, line in lines.items() if _WORKER in line
    }
    return sorted(numbers, key=numbers.__getitem__)


def _command_line(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


def kill(process: int) -> None:
    """Kill a process as the system does when memory is short."""
    os.kill(process, signal.SIGKILL)
