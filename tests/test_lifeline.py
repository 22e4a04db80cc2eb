"""The directory that a parent and its child have together is removed by whoever is left."""

import os
from pathlib import Path

import pytest

from nanoserve.processes.temporary import choose_directory, make_directory
from nanoserve.processes.watchdog import ParentWatchdog


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return choose_directory()


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("said", [b"", b"half a li"])
def test_a_child_that_was_told_nothing_removes_the_directory(chosen: Path, said: bytes, made: bool) -> None:  # noqa: FBT001
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
