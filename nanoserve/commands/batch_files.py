"""The two files of an offline batch: rows of prompts going in, rows of results coming out.

A result file only ever grows, a whole line at a time. What a killed run left is read back: finished
rows are not computed again, and a torn last line is cut off.
"""

import fcntl
import os
from codecs import BOM_UTF8
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.errors import RuntimeFailure, UsageError, shown
from nanoserve.utils.files import unwritable_as_failure

_ROW_BEGINS = b'{"index":'  # how every line of ours begins; nothing else is ever cut off


class PromptRow(msgspec.Struct, frozen=True):
    """One prompt of the input, or its line of the results."""

    index: int  # its line in the file, from 0
    id: str | int | None = None  # the user's name for it
    prompt: Any = None  # a text, or chat messages
    settings: Mapping[str, Any] = {}  # its own sampling settings
    error: str | None = None  # why it cannot be used, or was not answered

    @property
    def key(self) -> tuple[str, str | int]:
        """The key of its answer: the id, or the index of a row without an id."""
        if self.id is None:
            return "index", self.index
        return "id", self.id

    @property
    def repeated(self) -> "PromptRow":
        """The row as an error, where one before it has the same id."""
        return PromptRow(
            self.index, self.id, error=f"the id {shown(self.id)} appears a second time"
        )


def read_rows(path: Path) -> list[PromptRow]:
    """Rows of a ``.jsonl`` file, or one prompt per line of any other; blank lines are no rows.
    Raises UsageError."""
    try:
        # Windows' editors begin files with the mark
        lines = path.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    parse = _json_row if path.suffix.lower() in (".jsonl", ".ndjson") else _text_row
    rows, keys = [], set()
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        row = parse(index, line)
        if row.key in keys and row.error is None:
            row = row.repeated
        rows.append(row)
        keys.add(row.key)
    if not rows:
        raise UsageError(f"{path} has no prompts")
    return rows


def _text_row(index: int, line: bytes) -> PromptRow:
    try:
        return PromptRow(index, prompt=line.decode("utf-8"))
    except UnicodeDecodeError:
        return PromptRow(index, error="not valid UTF-8")


def _json_row(index: int, line: bytes) -> PromptRow:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return PromptRow(index, error=f"not valid JSON: {error}")
    if not isinstance(fields, dict):
        return PromptRow(index, error="not a JSON object")
    identity = fields.pop("id", None)
    if isinstance(identity, bool) or not isinstance(identity, str | int | None):
        return PromptRow(index, error="id must be a string or a whole number")
    row = partial(PromptRow, index, identity)
    is_chat = "messages" in fields
    if is_chat == ("prompt" in fields):
        return row(error='a row needs either "prompt" or "messages"')
    prompt = fields.pop("messages" if is_chat else "prompt")
    if not prompt:
        return row(error="the prompt is empty")
    if not isinstance(prompt, str | list):
        return row(error="the prompt is no text")
    if is_chat and not all(isinstance(message, dict) for message in prompt):
        return row(error="messages must be a list of {role, content} objects")
    return row(prompt, fields)


class ResultFile:
    """Appends result rows. Use it as a context manager.

    Raises UsageError if it is no regular file or holds anything but results, and RuntimeFailure if
    it cannot be written, or another run is writing it.
    """

    def __init__(self, path: Path):
        self._path = path
        self._answered: set[tuple[str, str | int]] = set()
        # by line, as two lines may have one id
        self._errors: dict[tuple[int, str | int | None], str] = {}
        with unwritable_as_failure(path), ExitStack() as opened:
            if path.exists() and not path.is_file():
                raise UsageError(
                    f"{path} is no regular file; --output is one, because the next run reads it "
                    "back"
                )
            # Opened or made in one step: asking first whether the file is there would let two runs
            # make it twice.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            self._file = opened.enter_context(open(descriptor, "r+b"))
            with suppress(OSError):  # a file system that knows no locks
                # two runs would write over each other's rows; the lock ends with the process,
                # however it ends
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    hint = "wait for it, or choose another --output"
                    raise RuntimeFailure(f"another run is writing {path}: {hint}") from None
            self._read_back()
            opened.pop_all()

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a row that could not be written, which has been said
            self._file.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Add one row; it is with the operating system when this returns. Raises RuntimeFailure if
        the disk is full."""
        with unwritable_as_failure(self._path):
            self._file.write(msgspec.json.encode(result) + b"\n")
            self._file.flush()

    def holds(self, row: PromptRow) -> bool:
        """Whether an earlier run finished the row: answered it, or wrote an error for this line."""
        if row.error is None and row.key in self._answered:
            return True
        error = self._errors.get((row.index, row.id))
        # That an id is taken depends on other lines. When they have changed, the row is still to be
        # answered.
        return error is not None and (row.error is not None or error != row.repeated.error)

    def _read_back(self) -> None:
        end = 0
        for number, line in enumerate(self._file, start=1):
            try:
                result = msgspec.json.decode(line, type=PromptRow)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                if not line.endswith(b"\n") and (
                    line.startswith(_ROW_BEGINS) or _ROW_BEGINS.startswith(line)
                ):
                    break  # a killed run left half of its last row
                what = f"{self._path} line {number} is not a result of a batch"
                raise UsageError(f"{what}; choose another --output") from None
            if result.error is None:
                self._answered.add(result.key)
            else:
                self._errors[result.index, result.id] = result.error
            end += len(line)
            # cut off just before the line break: the row itself is whole
            if not line.endswith(b"\n"):
                self._file.seek(0, os.SEEK_END)
                self._file.write(b"\n")
                end += 1
        self._file.seek(end)
        self._file.truncate()
