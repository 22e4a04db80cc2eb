"""The stream of an answer: server-sent events with one JSON object each.

Only the fields that are used here are decoded; servers send others too. Nothing that arrives is
trusted: lines have a maximum length, and an object of the wrong shape is an error that names the
server's fault.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from nanoserve.errors import RuntimeFailure

LONGEST_LINE = 1 << 20
_DATA = b"data:"
_DONE = b"[DONE]"
_LONGEST_MESSAGE = 500


class BrokenStream(RuntimeFailure):
    """A server sent something else than a stream of completion chunks."""


class _Incomplete(BrokenStream):
    """The data is no JSON, or only the beginning of it."""


class Delta(msgspec.Struct, frozen=True):
    """New text of a chat. Reasoning has two names: one of vLLM and llama.cpp, one of ollama and
    OpenRouter."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk: ``delta`` in a chat, ``text`` in a completion."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def answer(self) -> str:
        if self.delta is not None:
            return self.delta.content or ""
        return self.text or ""

    @property
    def thinking(self) -> str:
        """New text of the reasoning, from servers that separate it."""
        if self.delta is None:
            return ""
        return self.delta.reasoning_content or self.delta.reasoning or ""


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class ServerUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        if self.prompt_tokens_details is None:
            return None
        return self.prompt_tokens_details.cached_tokens


class Chunk(msgspec.Struct, frozen=True):
    """One event. Some servers send ``error`` within an answer that began well."""

    choices: tuple[ChunkChoice, ...] | None = None
    usage: ServerUsage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(Chunk)


class EventReader:
    """Splits received bytes, in pieces of any size, into the chunks of an answer."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun: list[bytes] = []  # the lines of an event whose JSON is not complete yet
        self.done = False  # whether the server has ended the answer

    def push(self, data: bytes) -> Iterator[Chunk]:
        """Yield the chunks that are complete now, up to a bad one. The caller must exhaust the
        iterator.

        Raises BrokenStream for data that is not a JSON object of the right shape, and for lines
        without an end.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            payload = b""
            if line.startswith(_DATA):
                payload = line[len(_DATA) :].strip()
            if self._begun and (not line.strip() or payload == _DONE):  # a blank line ends an event
                yield _decode(b"\n".join(self._begun))
                self._begun = []
            if payload == _DONE:
                self.done = True
            elif payload and self._begun:
                self._begun.append(payload)
            elif payload:
                # Most events have one line, and some servers leave out the blank one.
                try:
                    yield _decode(payload)
                except _Incomplete:
                    self._begun = [payload]
        if len(self._rest) + sum(map(len, self._begun)) > LONGEST_LINE:
            raise BrokenStream(f"the server sent a line of more than {LONGEST_LINE} bytes")


def _decode(data: bytes) -> Chunk:
    try:
        return _CHUNKS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"the server sent a chunk that makes no sense: {error}"
        if type(error) is msgspec.DecodeError:  # JSON of a wrong shape raises a subclass
            raise _Incomplete(message) from None
        raise BrokenStream(message) from None


class ErrorFacts(msgspec.Struct, frozen=True):
    """An error as a server describes it."""

    message: str
    code: str | None = None


def error_facts(body: Any) -> ErrorFacts | None:
    """The error in a decoded body: OpenAI's {"error": {...}}, {"error": "..."}, FastAPI's
    {"detail": ...}, or None."""
    error = body
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
    if isinstance(error, str):
        return ErrorFacts(error[:_LONGEST_MESSAGE])
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    named = [error.get(name) for name in ("code", "type")]
    code = next((name for name in named if isinstance(name, str) and name), None)
    return ErrorFacts(error["message"][:_LONGEST_MESSAGE], code)


def read_error(content: bytes) -> ErrorFacts | None:
    """The error in the body of an answer, or None."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return error_facts(msgspec.json.decode(content))
    return None


def printable(text: str) -> str:
    """A server's text as one line, without characters that control a terminal."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
