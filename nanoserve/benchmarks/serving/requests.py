"""What is asked: bodies of requests with prompts of given lengths that no server has seen before."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape
from nanoserve.models.shapes import DUMMY_PREFIX

ENDPOINTS = ("completions", "chat")

_TOKENS = range(300, 4000)
"""Ids that nearly every vocabulary has, and that are text there, not control tokens."""
_WORDS = (
    *("the", "and", "that", "have", "for", "not", "with", "you", "this", "but", "his", "from", "they", "say", "her"),
    *("will", "one", "all", "would", "there", "their", "what", "out", "about", "who", "get", "which", "when", "make"),
    *("can", "like", "time", "just", "him", "know", "take", "people", "into", "year", "your", "good", "some", "could"),
)
"""In most vocabularies a token each, with the blank before it."""
_BIASED_TOKENS = range(300, 332)
_STRONGEST_BIAS = 100


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that only has to be sent."""

    body: bytes
    shape: RequestShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStyle:
    """How requests are put."""

    model: str
    """Its name on the server."""
    endpoint: str = "completions"
    """Completions sends token ids; chat sends words, about as many as tokens are wanted."""
    ignore_eos: bool = True
    """Answers have the whole length that is asked for; an extra which not every server takes."""
    readable: bool = False
    """Only tokens that every tokenizer here can read are answered. A dummy model has more tokens than its tokenizer
    knows, and what cannot be read is not streamed."""

    @property
    def path(self) -> str:
        """Below /v1."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    @classmethod
    def of(cls, model: str, endpoint: str = "completions", *, ignore_eos: bool = True) -> Self:
        """For a model of this name, of which a dummy is told by it."""
        readable = model.startswith(DUMMY_PREFIX)
        return cls(model=model, endpoint=endpoint, ignore_eos=ignore_eos, readable=readable)

    def prepare(self, shapes: Sequence[RequestShape], salt: str) -> list[PreparedRequest]:
        """Requests of these lengths; the prompts are those of the salt, and other ones for every other salt."""
        generator = random.Random(salt)
        return [PreparedRequest(self._draw(shape, generator), shape) for shape in shapes]

    def _draw(self, shape: RequestShape, generator: random.Random) -> bytes:
        if self.endpoint == "chat":
            text = " ".join(generator.choices(_WORDS, k=shape.input_tokens))
            return self._body({"messages": [{"role": "user", "content": text}]}, shape.output_tokens)
        return self._body({"prompt": generator.choices(_TOKENS, k=shape.input_tokens)}, shape.output_tokens)

    def completion(self, prompt: Sequence[int], output_tokens: int) -> PreparedRequest:
        """A request with the very token ids that are given."""
        body = self._body({"prompt": prompt}, output_tokens)
        return PreparedRequest(body, RequestShape(len(prompt), output_tokens))

    def _body(self, prompt: dict[str, Any], output_tokens: int) -> bytes:
        """Greedy, streamed, with the usage at the end."""
        body = {"model": self.model, **prompt, "max_tokens": output_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.readable:
            body["logit_bias"] = {str(token): _STRONGEST_BIAS for token in _BIASED_TOKENS}
        return json.dumps(body).encode()


def check_endpoint(name: str) -> str:
    """Raise UsageError for one that there is not."""
    if name not in ENDPOINTS:
        raise UsageError(f"--endpoint {name!r:.40} is not one of {', '.join(ENDPOINTS)}")
    return name
