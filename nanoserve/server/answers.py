"""The JSON objects of an answer, whole or in chunks, for both kinds of completion."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from nanoserve.engine.outputs import Detokenizer, TokenDecoder
from nanoserve.request import CompletionOutput, RequestOutput, TokenLogprob
from nanoserve.text.answers.forms import AnswerParser
from nanoserve.text.answers.reader import Piece
from nanoserve.text.tokenizer import Tokenizer

PIECE = 128
"""Entries of a long list that are made without a break: log probabilities take up to 0.1 ms
each."""

T = TypeVar("T")


async def in_pieces(entries: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield some entries at a time, so that other requests run in between: an answer may have a
    million log probabilities."""
    for start in range(0, len(entries), PIECE):
        if start:
            await asyncio.sleep(0)
        yield entries[start : start + PIECE]


def _as_json(value: object) -> msgspec.Raw:
    """Encode the value as JSON now, so that encoding the whole answer later only copies the
    parts."""
    return msgspec.Raw(msgspec.json.encode(value))


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token as the lists of log probabilities show it."""

    text: str  # within a longer text; bytes that are no characters read as U+FFFD
    bytes: bytes

    @property
    def name(self) -> str:
        """The text, or `bytes:\\xf0\\x9f` for a part of a character: several of them have the same
        text."""
        is_part = "\ufffd" in self.text and self.text.encode() != self.bytes
        if is_part:
            return f"bytes:{repr(self.bytes)[2:-1]}"
        return self.text


def token_texts(tokenizer: Tokenizer) -> Callable[[int], TokenText]:
    """The texts of single tokens, control tokens included."""

    @lru_cache(65536)
    def text(token: int) -> TokenText:
        # Not decoded alone: at the beginning of a text, some tokenizers drop a token's blank.
        once = tokenizer.decode([token], skip_special_tokens=False)
        shown = tokenizer.decode([token, token], skip_special_tokens=False)[len(once) :]
        return TokenText(shown, tokenizer.token_bytes(token) or shown.encode())

    return text


class CompletionFormat(ABC):
    """One of the two shapes of an answer. An object is made for each answer."""

    prefix: str  # prefix of the answer's id
    kind: str
    chunk_kind: str
    """The field ``object`` of the whole answer and of its chunks."""

    def __init__(self, model: str, text_of: Callable[[int], TokenText]) -> None:
        self.answer_id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._model = model
        self._text_of = text_of
        self._created = int(time.time())
        self._offsets = Counter[int]()  # where the next text begins, by choice

    @abstractmethod
    async def choice(
        self, index: int, request: RequestOutput, output: CompletionOutput, name: str = "message"
    ) -> dict[str, Any]:
        """Make one choice of a request, or the new part of it; a chat has its text in the field
        ``name``. Other requests run while a long choice is made."""

    def envelope(
        self, kind: str, choices: Sequence[dict[str, Any] | msgspec.Raw]
    ) -> dict[str, Any]:
        """Make the whole answer or a chunk of it, with these choices."""
        head = {
            "id": self.answer_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }
        return head | {"choices": choices}


class ChatFormat(CompletionFormat):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        text_of: Callable[[int], TokenText],
        parser: Callable[[], AnswerParser],
        *,
        parallel: bool = True,
    ) -> None:
        """``parser`` makes a parser for each answer. Without ``parallel``, only an answer's first
        call is sent."""
        super().__init__(model, text_of)
        self._parsers = defaultdict[int, AnswerParser](parser)
        self._calls = Counter[int]()  # by choice
        self._parallel = parallel

    async def choice(
        self, index: int, request: RequestOutput, output: CompletionOutput, name: str = "message"
    ) -> dict[str, Any]:
        content = self._content(index, output)
        if name == "message":
            for call in content.get("tool_calls", ()):
                del call["index"]  # for chunks
        logprobs = None
        if output.logprobs is not None:
            logprobs = {"content": await self._entries(output.logprobs)}
        reason = output.finish_reason
        if reason == "stop" and self._calls[index]:
            reason = "tool_calls"
        return {"index": index, name: content, "logprobs": logprobs, "finish_reason": reason}

    def _content(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        """The message, or the new part of it."""
        ended = output.finish_reason is not None
        pieces = self._parsers[index].push(output.text, output.marks, ended=ended)
        answer = "".join(text for kind, text in pieces if kind == "answer")
        thoughts = "".join(text for kind, text in pieces if kind == "thinking")
        calls = self._call_parts(index, pieces)
        if not (answer or thoughts or calls or ended):
            return {}
        content: dict[str, Any] = {}
        # the role comes with the first text: clients time the first chunk
        if index not in self._offsets:
            content["role"] = "assistant"
            content["content"] = answer
            if not answer and (thoughts or calls):
                content["content"] = None
        elif answer:
            content["content"] = answer
        self._offsets[index] += len(output.text)
        if thoughts:
            content["reasoning_content"] = thoughts
        if calls:
            content["tool_calls"] = calls
        return content

    def _call_parts(self, index: int, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """The new parts of calls in OpenAI's form, one for each call with new text."""
        parts: dict[int, dict[str, Any]] = {}
        for kind, text in pieces:
            if kind == "call":
                place = self._calls[index]
                self._calls[index] += 1
                # The id has nine characters because Mistral's templates insist on it.
                identity = {"index": place, "id": secrets.token_hex(5)[:9], "type": "function"}
                parts[place] = identity | {"function": {"name": text, "arguments": ""}}
            elif kind == "arguments":
                place = self._calls[index] - 1
                part = parts.setdefault(place, {"index": place, "function": {"arguments": ""}})
                part["function"]["arguments"] += text
        return [part for place, part in parts.items() if self._parallel or place == 0]

    async def _entries(self, logprobs: Sequence[TokenLogprob]) -> list[msgspec.Raw]:
        """The entry of each token, with the likeliest tokens at its place."""
        entries: list[msgspec.Raw] = []
        async for piece in in_pieces(logprobs):
            for one in piece:
                entry = self._entry(one.token, one.logprob)
                entry["top_logprobs"] = [self._entry(token, logprob) for token, logprob in one.top]
                entries.append(_as_json(entry))
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        shown = self._text_of(token)
        return {"token": shown.text, "logprob": logprob, "bytes": list(shown.bytes)}


class TextFormat(CompletionFormat):
    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        model: str,
        text_of: Callable[[int], TokenText],
        tokenizer: TokenDecoder,
        echoes: Iterable[str] = (),
    ) -> None:
        """``echoes`` are the texts with which the choices begin, if they echo their prompts."""
        super().__init__(model, text_of)
        self._tokenizer = tokenizer
        self._echoes = dict(enumerate(echoes))  # not sent yet, by choice
        self._detokenizers: dict[int, Detokenizer] = {}  # by choice

    async def choice(
        self, index: int, request: RequestOutput, output: CompletionOutput, name: str = "message"
    ) -> dict[str, Any]:
        echo = self._echoes.pop(index, None)
        logprobs = None
        if output.logprobs is not None:
            scored: list[tuple[int, TokenLogprob | None]] = []
            continued = request.prompt_token_ids
            if echo is not None:
                scored += zip(continued, request.prompt_logprobs or (), strict=True)
                continued = ()
            scored += [(one.token, one) for one in output.logprobs]
            if index not in self._detokenizers:
                self._detokenizers[index] = Detokenizer(self._tokenizer, continued)
            logprobs = await self._logprobs(index, scored)
        text = output.text
        if echo is not None:
            text = echo + text
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    async def _logprobs(
        self, index: int, scored: Sequence[tuple[int, TokenLogprob | None]]
    ) -> dict[str, Any]:
        """Parallel lists; ``text_offset`` says where each token's text begins in the choice.
        Nothing predicts the first token of a prompt, so it has None."""
        lists: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        async for piece in in_pieces(scored):
            for token, one in piece:
                name = self._text_of(token).name
                logprob = None
                top = None
                if one is not None:
                    logprob = one.logprob
                    # Of tokens with the same text, the likeliest counts.
                    texts: dict[str, float] = {}
                    for other, other_logprob in one.top:
                        texts.setdefault(self._text_of(other).name, other_logprob)
                    texts.setdefault(name, logprob)
                    top = _as_json(texts)
                lists["tokens"].append(name)
                lists["token_logprobs"].append(logprob)
                lists["top_logprobs"].append(top)
                lists["text_offset"].append(self._offsets[index])
                self._offsets[index] += len(self._detokenizers[index].push([token]))
        return lists
