"""The objects that a client gets back, whole and in pieces, for both kinds of completion."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from nanoserve.request import CompletionOutput
from nanoserve.server.logprobs import TokenTexts, chat_logprobs, completion_logprobs


@dataclass(slots=True)
class Usage:
    """Tokens of one answer, over all its prompts and samples."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer repeats."""

    answer_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))


class Answer(Protocol):
    """One of the two shapes."""

    def chunk(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        """One piece of one choice."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a client that asked for the usage."""

    def choice(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        """All of one choice."""

    def whole(self, choices: Sequence[msgspec.Raw], usage: Usage) -> dict[str, Any]:
        """Everything at once; the choices in order, as JSON."""


class ChatAnswer:
    """``chat.completion`` and its chunks."""

    def __init__(self, heading: Heading, texts: TokenTexts) -> None:
        self._heading = heading
        self._texts = texts
        self._begun: set[int] = set()

    def chunk(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        delta = {"content": output.text} if output.text else {}
        if choice not in self._begun:  # with its first text: clients take the first chunk for the first token
            self._begun.add(choice)
            delta = {"role": "assistant", "content": output.text}
        return self._chunk([_chat_choice(choice, self._logprobs(output), output.finish_reason, delta=delta)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage.as_json()}

    def choice(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text}
        return _chat_choice(choice, self._logprobs(output), output.finish_reason, message=message)

    def whole(self, choices: Sequence[msgspec.Raw], usage: Usage) -> dict[str, Any]:
        return _object("chat.completion", self._heading, choices) | {"usage": usage.as_json()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return _object("chat.completion.chunk", self._heading, choices)

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        return None if output.logprobs is None else chat_logprobs(output.logprobs, self._texts)


class CompletionAnswer:
    """``text_completion``, whose chunks have the same shape as the whole."""

    def __init__(self, heading: Heading, texts: TokenTexts) -> None:
        self._heading = heading
        self._texts = texts
        self._offsets: dict[int, int] = {}

    def chunk(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        return _object("text_completion", self._heading, [self.choice(choice, output)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return _object("text_completion", self._heading, []) | {"usage": usage.as_json()}

    def whole(self, choices: Sequence[msgspec.Raw], usage: Usage) -> dict[str, Any]:
        return _object("text_completion", self._heading, choices) | {"usage": usage.as_json()}

    def choice(self, choice: int, output: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            offset = self._offsets.get(choice, 0)
            logprobs = completion_logprobs(output.logprobs, self._texts, offset)
            self._offsets[choice] = offset + sum(map(len, logprobs["tokens"]))
        return {"index": choice, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}


def _object(kind: str, heading: Heading, choices: Sequence[dict[str, Any] | msgspec.Raw]) -> dict[str, Any]:
    return {
        "id": heading.answer_id,
        "object": kind,
        "created": heading.created,
        "model": heading.model,
        "choices": choices,
    }


def _chat_choice(
    choice: int, logprobs: dict[str, Any] | None, finish_reason: str | None, **content: dict[str, Any]
) -> dict[str, Any]:
    return {"index": choice, **content, "logprobs": logprobs, "finish_reason": finish_reason}
