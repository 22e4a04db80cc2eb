"""The JSON objects of an answer, whole or in chunks, for both kinds of completion."""

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from nanoserve.request import CompletionOutput, TokenLogprob
from nanoserve.text.tokenizer import Tokenizer


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The texts of single tokens within a longer text: at the beginning, some tokenizers drop a token's blank."""

    @lru_cache(65536)
    def text(token: int) -> str:
        once = tokenizer.decode([token], skip_special_tokens=False)
        return tokenizer.decode([token, token], skip_special_tokens=False)[len(once) :]

    return text


class CompletionFormat(ABC):
    """One of the two shapes of an answer. An object is made for each answer."""

    prefix: str
    """Prefix of the answer's id."""
    kind: str
    chunk_kind: str
    """The field ``object`` of the whole answer and of its chunks."""

    def __init__(self, model: str, text_of: Callable[[int], str]) -> None:
        self.answer_id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._model = model
        self._text_of = text_of
        self._created = int(time.time())
        self._offsets = Counter[int]()  # where the next text begins, by choice

    @abstractmethod
    def choice(self, index: int, output: CompletionOutput, name: str = "message") -> dict[str, Any]:
        """One choice, or what is new of it; a chat has its text in the field ``name``."""

    def envelope(self, kind: str, choices: Sequence[dict[str, Any] | msgspec.Raw]) -> dict[str, Any]:
        """The whole answer or a chunk of it, with these choices."""
        head = {"id": self.answer_id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": choices}


class ChatFormat(CompletionFormat):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, output: CompletionOutput, name: str = "message") -> dict[str, Any]:
        content = {"role": "assistant", "content": output.text}
        if index in self._offsets:  # the role comes with the first text: clients time the first chunk
            content = {"content": output.text} if output.text else {}
        self._offsets[index] += len(output.text)
        entries = [
            self._entry(one.token, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in output.logprobs or ()
        ]
        logprobs = None if output.logprobs is None else {"content": entries}
        return {"index": index, name: content, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextFormat(CompletionFormat):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def choice(self, index: int, output: CompletionOutput, name: str = "message") -> dict[str, Any]:
        logprobs = None if output.logprobs is None else self._logprobs(index, output.logprobs)
        return {"index": index, "text": output.text, "logprobs": logprobs, "finish_reason": output.finish_reason}

    def _logprobs(self, index: int, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Parallel lists; ``text_offset`` says where each token's text begins in the choice."""
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            text = self._text_of(one.token)
            # The sampled token is listed too, even if it is not among the likeliest.
            top = {self._text_of(token): logprob for token, logprob in (*one.top, (one.token, one.logprob))}
            for name, value in zip(lists, (text, one.logprob, top, self._offsets[index]), strict=True):
                lists[name].append(value)
            self._offsets[index] += len(text)
        return lists
