"""The directory that a parent and its child have together is removed by whoever is left."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.lifeline import choose_directory, in_shared_memory, make_directory, read_line, remove_directory


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
        read_line(reader, chosen)
    os.close(reader)
    assert ended.value.code == 0 and list(chosen.parent.iterdir()) == []


def test_only_its_owner_may_enter_a_directory_and_none_is_taken_over(chosen: Path) -> None:
    make_directory(chosen)
    assert chosen.stat().st_mode & 0o777 == 0o700
    with pytest.raises(RuntimeFailure, match=r"no temporary directory can be made \(File exists\): set TMPDIR"):
        make_directory(chosen)
    assert choose_directory() != chosen


def test_shared_memory_that_cannot_be_written_to_is_told_apart(
    chosen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr("nanoserve.lifeline._SHARED_MEMORY", memory)
    shared = in_shared_memory(chosen)
    make_directory(shared)
    with pytest.raises(
        RuntimeFailure, match=r"workers share memory in .*, but nothing can be made there \(File exists"
    ):
        make_directory(shared)


def test_what_is_shared_has_a_place_of_its_own_where_temporary_files_are_memory_too(
    chosen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.lifeline._SHARED_MEMORY", tmp_path)  # as with TMPDIR=/dev/shm
    make_directory(chosen)
    shared = in_shared_memory(chosen)
    make_directory(shared)
    remove_directory(chosen)
    assert not shared.exists() and not chosen.exists()


def test_what_is_written_while_a_directory_is_removed_does_not_keep_it(
    chosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a compiler does that is to be killed only afterwards."""
    rmdir = os.rmdir

    def write_and_rmdir(*arguments: Any, **settings: Any) -> None:
        with suppress(FileNotFoundError):
            (chosen / "object.o").touch()
        rmdir(*arguments, **settings)

    make_directory(chosen)
    (chosen / "source.cpp").touch()
    monkeypatch.setattr(os, "rmdir", write_and_rmdir)
    remove_directory(chosen)
    assert list(chosen.parent.iterdir()) == []
