"""The directory that a parent and its child have together is removed by whoever is left."""

import os
import signal
from pathlib import Path

import pytest

from nanoserve.utils.temporary import choose_directory, make_directory, remove_directory
from nanoserve.utils.watchdog import ParentWatchdog, TiedChild, end_children
from tests.processes import MARK, kill, marked, new_mark, wait_for_processes
from tests.server.starting import wait_until


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return choose_directory()


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("said", [b"", b"half a li"])
def test_a_child_that_was_told_nothing_removes_the_directory(
    *, chosen: Path, said: bytes, made: bool
) -> None:
    if made:
        make_directory(chosen)
        (chosen / "socket").touch()
    reader, writer = os.pipe()
    os.write(writer, said)
    os.close(writer)
    with pytest.raises(SystemExit) as ended:
        ParentWatchdog(reader, reader, chosen).read_line()
    os.close(reader)
    assert ended.value.code == 0 and list(chosen.parent.iterdir()) == []


_WORKER = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
_ENGINE = f"""
import os, signal, subprocess, sys, time
from nanoserve.utils.watchdog import ParentWatchdog
watchdog = ParentWatchdog.of_this_process()
worker = subprocess.Popen([sys.executable, "-c", {_WORKER!r}], process_group=0)
watchdog.start()
time.sleep(600)
"""


def test_a_child_that_ends_buries_its_own_dead_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed worker, of which its parent knows nothing yet, has left a process in its group."""
    monkeypatch.setenv(MARK, mark := new_mark())
    engine = TiedChild(_ENGINE)
    try:
        wait_for_processes(mark, 3)
        kill(marked(mark)[1])
        wait_for_processes(mark, 2)
    finally:
        end_children([engine], None, 60.0)
    wait_for_processes(mark, 0)


@pytest.mark.parametrize("end", ["by its parent, stopped", "by itself"])
def test_what_a_child_has_made_beside_goes_with_it(chosen: Path, end: str) -> None:
    """The directory where workers meet is such a thing: a dead worker cannot remove it."""
    program = (
        "import sys, time; from pathlib import Path; from nanoserve.utils.temporary import *; "
        "from nanoserve.utils.watchdog import ParentWatchdog; "
        "ParentWatchdog.of_this_process().start(); "
        "own = choose_directory(Path(sys.argv[3])); make_directory(own); (own / "
        "'meeting').touch(); time.sleep(600)"
    )
    child = TiedChild(program, str(chosen.parent), directory=chosen)
    make_directory(chosen)
    wait_until(lambda: len(list(chosen.parent.glob("*/meeting"))) == 1)
    if end == "by itself":
        child.let_go()
        child.process.wait()
        assert list(chosen.parent.iterdir()) == []
    else:
        child.process.send_signal(signal.SIGSTOP)
        end_children([child], chosen, 0.0)
        assert list(chosen.parent.iterdir()) == []
    remove_directory(chosen)
