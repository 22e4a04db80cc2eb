"""Read the small files of a model directory and write files of results, with errors that name the
file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from nanoserve.errors import ModelError, NanoserveError, RuntimeFailure, UsageError, shown


@contextmanager
def unreadable_as_model_error() -> Iterator[None]:
    """Raise ModelError for errors of the file system while a model is located and read."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"the model cannot be read: {error.strerror or error} ({error.filename})"
        ) from error


@contextmanager
def unwritable_as_failure(path: Path) -> Iterator[None]:
    """Raise RuntimeFailure for errors of the file system while that file is written."""
    try:
        yield
    except OSError as error:
        raise RuntimeFailure(f"cannot write {path}: {error.strerror or error}") from error


def read_bytes(path: Path, failure: type[NanoserveError] = ModelError) -> bytes:
    """The file's content. Raises ``failure`` naming the file when it cannot be read."""
    try:
        # for a missing file, reading raises the system's own error
        if path.is_file() or not path.exists():
            return path.read_bytes()
    except OSError as error:
        raise failure(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # a path with a NUL in it
        raise failure(f"cannot read {shown(str(path))}: {error}") from error
    # A directory, or a pipe or device that might never end.
    raise failure(f"{path} is not a regular file")


def read_text(path: Path, failure: type[NanoserveError] = ModelError) -> str:
    """The file as text. Raises ``failure`` naming the file when it cannot be read or is not
    UTF-8."""
    try:
        return read_bytes(path, failure).decode()
    except UnicodeDecodeError as error:
        raise failure(f"{path} is not UTF-8 text") from error


def read_toml(path: Path) -> dict[str, Any]:
    """The file's top-level tables. Raises UsageError, naming it, if it cannot be read or is not
    TOML."""
    import tomllib

    try:
        return tomllib.loads(read_bytes(path, UsageError).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError naming the file when it is missing, broken or
    not an object."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise unusable_file(path, f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but a missing file is an empty object."""
    if not path.exists():
        return {}
    return read_json_object(path)


_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def unusable_file(path: Path, message: str) -> ModelError:
    """Make the error for a model's file in a wrong format, with this message. If only a Git-LFS
    pointer was downloaded, the message says how to get the file."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            remedy = "run `git lfs pull` in its directory, or download it again"
            return ModelError(f"{path}: only a Git-LFS pointer to the file; {remedy}")
    return ModelError(message)


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file atomically, with this mode less the umask; an error leaves nothing behind.
    Raises RuntimeFailure if it cannot be written."""
    if isinstance(content, str):
        content = content.encode()
    draft = path.parent / f".{path.name}.{os.getpid()}"
    with unwritable_as_failure(path):
        if path.exists() and not path.is_file():  # a device must not be replaced by a file
            path.write_bytes(content)
            return
        try:
            with open(draft, "wb", opener=partial(os.open, mode=mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a crash leaves the old content or the new
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
