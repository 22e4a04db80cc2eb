"""Directories of processes that live, and what is left of those that do not."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.utils import temporary
from nanoserve.utils.temporary import (
    choose_directory,
    make_directory,
    remove_directory,
    temporary_directory,
)


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return choose_directory()


def test_only_its_owner_may_enter_a_directory_and_none_is_taken_over(chosen: Path) -> None:
    make_directory(chosen)
    assert chosen.stat().st_mode & 0o777 == 0o700
    with pytest.raises(
        RuntimeFailure, match=r"no temporary directory can be made \(File exists\): set TMPDIR"
    ):
        make_directory(chosen)
    assert choose_directory() != chosen and chosen.is_dir()


def test_what_is_written_while_a_directory_is_removed_does_not_keep_it(
    chosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is killed only afterwards may write meanwhile."""
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


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from nanoserve.utils.temporary import "
        "*\n"
        "make_directory(directory := choose_directory(Path(sys.argv[1])))\n"
        "(directory / 'object.o').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    left.rename(half_removed := left.with_name(f"{left.name}-gone"))
    (tmp_path / "nanoserve-0123456789").mkdir()  # killed before it could lock it
    make_directory(living := tmp_path / "nanoserve-9876543210")
    (tmp_path / "nanoserve-results").mkdir()
    chosen = choose_directory(tmp_path)
    assert not half_removed.exists() and sorted(tmp_path.iterdir()) == [
        living,
        tmp_path / "nanoserve-results",
    ]
    assert chosen.parent == tmp_path
    remove_directory(living)


def test_a_directory_that_is_taken_for_a_dead_ones_is_made_again(
    chosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks for a name just between making it and locking it."""
    lock, others = temporary._lock, [choose_directory, lambda: None]

    def look_and_lock(path: Path) -> int | None:
        others.pop(0)()
        return lock(path)

    monkeypatch.setattr(temporary, "_lock", look_and_lock)
    make_directory(chosen)
    assert chosen.is_dir() and others == []
    choose_directory()
    assert chosen.is_dir(), "it is locked now"


def test_a_directory_of_one_process_goes_with_what_is_done_in_it(chosen: Path) -> None:
    with pytest.raises(ZeroDivisionError), temporary_directory() as directory:
        (directory / "message.txt").touch()
        _ = 1 / 0
    assert list(chosen.parent.iterdir()) == []
