"""Reading the small JSON and text files of a model directory, with errors that name the file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoserve.errors import ModelError


@contextmanager
def unreadable_as_model_error() -> Iterator[None]:
    """While a model is looked for and read, whatever the file system refuses makes that model unusable."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"the model cannot be read: {error.strerror or error} ({error.filename})") from error


def read_text(path: Path) -> str:
    """The file as text. Raises ModelError naming the file when it cannot be read or is not UTF-8."""
    try:
        if path.exists() and not path.is_file():  # a directory; or a pipe or device, reading which might never end
            raise ModelError(f"{path} is not a regular file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError naming the file when it is missing, broken or not an object."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json_object`, but a missing file is an empty object."""
    return read_json_object(path) if path.exists() else {}
