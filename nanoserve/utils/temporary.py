"""Directories that are removed with the processes that use them.

The process that makes a directory locks it. The lock ends with the process, however it ends.
Directories without a lock are removed by the parent when it ends its children, and by the next
process that chooses a name.
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
    """A new name in ``parent``, by default the system's for temporary files. Removes the
    directories of dead processes.

    Children are started with the name before the directory is made. So whichever process is killed,
    and whenever, another one knows what to remove. Raises RuntimeFailure if the system has no
    directory for temporary files.
    """
    if parent is None:
        with _as_failure():
            parent = Path(tempfile.gettempdir())
    remove_abandoned(parent)
    return parent / f"nanoserve-{secrets.token_hex(5)}"


def make_directory(path: Path) -> None:
    """A new directory that only this user may enter, until `remove_directory` or the end of this
    process.

    Raises RuntimeFailure if it cannot be made, or the name is taken.
    """
    with _as_failure():
        path.mkdir(mode=0o700)
        while (lock := _lock(path)) is None:
            path.mkdir(mode=0o700)
        _locks[path] = lock


def remove_directory(directory: Path | None) -> None:
    """Remove a directory, if there is one."""
    if directory is None:
        return
    # Renamed first: otherwise a thread or a compiler that still works could add a file meanwhile,
    # and it would stay.
    gone = directory.with_name(f"{directory.name.removesuffix('-gone')}-gone")
    with suppress(OSError):
        directory.rename(gone)
    for name in (gone, directory):
        shutil.rmtree(name, ignore_errors=True)
    lock = _locks.pop(directory, None)
    if lock is not None:
        os.close(lock)


def remove_directories() -> None:
    """Remove all directories that this process has made."""
    for directory in list(_locks):
        remove_directory(directory)


@contextmanager
def temporary_directory() -> Iterator[Path]:
    """A directory for this process alone. Raises RuntimeFailure if it cannot be made."""
    directory = choose_directory()
    make_directory(directory)
    try:
        yield directory
    finally:
        remove_directory(directory)


def _lock(path: Path) -> int | None:
    """Lock a new directory; None if another process has removed it as abandoned."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # a file system without locks: no process can have locked it
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    os.close(descriptor)
    return None


def remove_abandoned(parent: Path) -> None:
    """Remove directories without a lock. One that is not locked yet is made again by its
    process."""
    with suppress(OSError):
        for path in parent.iterdir():
            if _NAME.fullmatch(path.name) is None:
                continue
            with suppress(OSError):  # it belongs to another user, is locked, or is gone
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid == os.geteuid():
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_directory(path)
                finally:
                    os.close(descriptor)


@contextmanager
def _as_failure() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "set TMPDIR to a directory that can be written to"
        raise RuntimeFailure(
            f"no temporary directory can be made ({error.strerror}): {hint}"
        ) from None
