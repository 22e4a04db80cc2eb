"""A start with two workers is ended at any moment: no process, socket or directory is left behind,
and no traceback."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest

from tests.processes import MARK, marked, new_mark
from tests.server.conftest import MODEL
from tests.server.starting import ROOT, wait_until

COMMANDS = {
    "serve": ("serve", "--port", "0"),
    "engine": ("serve", "--port", "0"),  # of which the engine alone is sent the signal
    "generate": ("generate", "Once upon a time", "-n", "100000"),
}
KILL, TERM, INTERRUPT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
Case = tuple[str, float, signal.Signals]


def _end_at(case: Case) -> None:
    """Start a command, end it after so many seconds, and look at what is left."""
    command, moment, number = case
    mark, directory = new_mark(), Path(tempfile.mkdtemp(prefix="ns"))
    process = subprocess.Popen(
        [sys.executable, "cli.py", *COMMANDS[command], "--pp", "2", *MODEL],
        cwd=ROOT,
        env=os.environ | {MARK: mark, "TMPDIR": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        time.sleep(moment)
        group = _engine_of(mark, process.pid) if command == "engine" else process.pid
        os.killpg(group, number)  # as a terminal does
        try:
            _, said = process.communicate(timeout=60 if command == "engine" else 240)
        except subprocess.TimeoutExpired:
            assert command == "engine", (
                "only a server outlives the signal, and only if its engine was ready by then"
            )
            process.terminate()
            _, said = process.communicate(timeout=240)
            assert "ready:" in said
        wait_until(lambda: marked(mark) == [])
        wait_until(lambda: _left_in(directory) == [])
        assert f"{ROOT}/nanoserve/" not in said, "no traceback but of Python's own start"
    except BaseException as error:
        error.add_note(f"{case}: left {marked(mark)} and {_left_in(directory)}")
        raise
    finally:
        process.kill()
    shutil.rmtree(directory)


def _engine_of(mark: str, front_end: int) -> int:
    """The front end's child, which leads a process group; or itself, where it has no such child
    yet."""
    for process in marked(mark):
        if _parent_of(process) == front_end and os.getpgid(process) == process:
            return process
    return front_end


def _parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _left_in(directory: Path) -> list[str]:
    """But for the cache that torch makes there when it is imported."""
    return [str(path) for path in directory.rglob("*") if "torchinductor" not in str(path)]


@pytest.mark.slow
def test_nothing_is_left_of_a_start_that_was_ended_at_any_moment() -> None:
    """The engine alone is killed while it is loading: the front end gives up. On a fast machine the
    last moments may come after the start; then it starts another engine."""
    signals = cycle((KILL, TERM, INTERRUPT))
    cases = [(("serve", "generate")[number % 2], number / 2, next(signals)) for number in range(14)]
    cases += [("engine", moment, KILL) for moment in (1.5, 2.5, 3.5)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(_end_at, cases))
