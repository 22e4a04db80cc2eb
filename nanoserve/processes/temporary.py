"""Directories for what need not outlast the processes that use it.

A directory is locked by the process that made it. However that ends, the lock is gone with it, and whoever looks for a
name next removes what it has left.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoserve.errors import RuntimeFailure

_NAME = re.compile(r"nanoserve-[0-9a-f]{10}(-gone)?")
_locks: dict[Path, int] = {}
"""Open descriptors of the directories that this process has made."""


def choose_directory(parent: Path | None = None) -> Path:
    """A name that nothing has, for a directory of a parent and its children; what dead ones left is removed.

    They are started with that name before the parent makes it: at any moment, whoever of them is killed, one is left
    that knows what to remove.

    Args:
        parent: where it will be, if not where the system keeps temporary files.

    Raises:
        RuntimeFailure: if there is no place for one.
    """
    try:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
    except OSError as error:
        raise _no_directory(error) from None
    _remove_what_dead_processes_left(parent)
    return parent / f"nanoserve-{secrets.token_hex(5)}"


def make_directory(path: Path) -> None:
    """A new directory that only this user may enter, until `remove_directory` or the end of this process.

    Raises:
        RuntimeFailure: if it cannot be made, or there is something of that name.
    """
    try:
        while True:
            path.mkdir(mode=0o700)
            if (lock := _lock(path)) is not None:
                _locks[path] = lock
                return
    except OSError as error:
        raise _no_directory(error) from None


def remove_directory(directory: Path) -> None:
    """Remove a chosen directory, if it is there.

    It gets another name first: whoever still works (a thread of this process, a compiler) could otherwise put a file
    into one that has just been emptied, and it would stay.
    """
    gone = directory.with_name(f"{directory.name.removesuffix('-gone')}-gone")
    with suppress(OSError):
        directory.rename(gone)
    for name in (gone, directory):
        shutil.rmtree(name, ignore_errors=True)
    if (lock := _locks.pop(directory, None)) is not None:
        os.close(lock)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory of this process alone.

    Raises:
        RuntimeFailure: if it cannot be made.
    """
    make_directory(directory := choose_directory())
    try:
        yield directory
    finally:
        remove_directory(directory)


def _lock(path: Path) -> int | None:
    """Lock a directory that has just been made; None if somebody took it for a dead process's meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: nobody can have taken it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    return None


def _remove_what_dead_processes_left(parent: Path) -> None:
    """Directories that nobody holds locked; also one that is not locked yet, whose maker then makes it again."""
    with suppress(OSError):
        for path in parent.iterdir():
            if _NAME.fullmatch(path.name) is None:
                continue
            with suppress(OSError):  # another user's, or locked, or gone
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_directory(path)
                finally:
                    os.close(descriptor)


def _no_directory(error: OSError) -> RuntimeFailure:
    return RuntimeFailure(
        f"no temporary directory can be made ({error.strerror}): set TMPDIR to a directory that can be written to"
    )
