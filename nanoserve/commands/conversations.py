"""The conversations that are kept, each in a file of its own that is named by its time (UTC)."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from nanoserve.errors import UsageError
from nanoserve.utils.files import read_bytes

MOST_LOGS = 1000
"""Conversations that are kept. Each answer to a command's argument is one, so there are many."""
_NAME = re.compile(r"\d[\d-]*")


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn of one side. ``interrupted`` marks an answer that Ctrl-C cut short; the model does
    not see the mark."""

    role: Literal["system", "user", "assistant"]
    content: str
    interrupted: bool = False


class SavedTurns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a saved conversation: its newest turns. ``/save`` writes all in one line, a log a
    line per answer."""

    messages: list[Message]
    position: int = 0  # how many of the messages before them stay
    system: str | None = None
    settings: dict[str, Any] = {}


class KeptConversation(NamedTuple):
    """A kept conversation, for a list of them."""

    name: str
    messages: int
    first: str  # the first message


def read_lines(path: Path) -> list[SavedTurns]:
    """The lines of a saved conversation. Raises UsageError for other files."""
    content = read_bytes(path, UsageError)
    # a full disk may have cut a log's last line
    whole = content[: content.rfind(b"\n") + 1] or content
    try:
        lines = msgspec.json.Decoder(SavedTurns).decode_lines(whole)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a saved chat: {error}") from None
    if not lines:
        raise UsageError(f"{path} is not a saved chat: it is empty")
    return lines


def kept(directory: Path, most: int) -> Iterator[KeptConversation]:
    """The newest conversations, the newest first; files that hold none are left out."""
    paths = sorted(directory.glob("*.jsonl"), key=lambda path: path.stem, reverse=True)
    for path in paths[:most]:
        with suppress(UsageError):
            lines = read_lines(path)
            if lines[0].messages:
                number = lines[-1].position + len(lines[-1].messages)
                yield KeptConversation(path.stem, number, lines[0].messages[0].content)


def is_name(text: str) -> bool:
    """Whether this looks like the name of a conversation, or its beginning."""
    return _NAME.fullmatch(text) is not None


def find(directory: Path, name: str | None) -> Path:
    """The file of the newest conversation, or of the one with this name, or else of the newest
    whose name begins so. Raises UsageError if there is none."""
    paths = sorted(directory.glob("*.jsonl"), key=lambda path: path.stem)
    if not paths:
        raise UsageError(
            f"there is no conversation to continue in {directory}; leave out --continue"
        )
    if name is None:
        return paths[-1]
    named = [path for path in paths if path.stem == name]
    if not named:
        named = [path for path in paths if path.stem.startswith(name)]
    if not named:
        raise UsageError(f"no conversation is called {name}; in a chat, /conversations lists them")
    return named[-1]


def new_log(directory: Path) -> Path:
    """A new private file. The oldest of too many are removed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in sorted(directory.glob("*.jsonl"), key=lambda path: path.stem)[: 1 - MOST_LOGS]:
        old.unlink(missing_ok=True)
    second = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    for number in count(1):
        name = second if number == 1 else f"{second}-{number:02}"
        path = directory / f"{name}.jsonl"
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return path
    raise AssertionError("numbers do not end")
