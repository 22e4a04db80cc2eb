"""What the endpoints share: the tokenizer, the engine, the limits, and the way from a prompt to a running request."""

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from nanoserve.errors import NanoserveError, UsageError
from nanoserve.grammar.checker import GrammarChecker
from nanoserve.request import MAX_SEED, Request, SamplingParams
from nanoserve.server.api_errors import ApiError
from nanoserve.server.engine_client import EngineClient, EngineUnavailable
from nanoserve.server.hosts import AllowedHosts
from nanoserve.server.logprobs import TokenTexts
from nanoserve.server.messages import Ready
from nanoserve.server.metrics import Metrics
from nanoserve.server.streams import RequestStream
from nanoserve.text.chat_template import check_text
from nanoserve.text.tokenizer import PromptTooLong, Tokenizer

_INLINE_CHARACTERS = 4096
"""Longer texts take long enough to tokenize that others would wait: they go to a thread."""
_LONG_CHARACTERS = 32768
_TOKENIZING_THREADS = 2
_NO_ANNOTATIONS: tuple[str, list[object]] = ("annotations", [])
"""OpenAI's client has it in every answer, and sends it back in the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client may take of the server."""

    body_bytes: int = 1 << 20
    """Of a request."""
    client_seconds: float = 30.0
    """Within which a client has to send its request, and to take what it is sent."""
    request_seconds: float = 1800.0
    """From the request to the end of its answer."""
    prompts: int = 128
    """In one completion request."""
    messages: int = 4096
    """In one conversation."""


class Service:
    """Everything an endpoint needs.

    Args:
        model_name: under which the model is served.
        root: its own name.
        api_keys: one of which every client must show; empty where none is needed.
        allowed_hosts: names that clients may call the server; None allows every name.
        seed: makes the seeds repeatable that requests without one are given.
    """

    def __init__(
        self,
        *,
        model_name: str,
        root: str,
        tokenizer: Tokenizer,
        engine: EngineClient,
        grammars: GrammarChecker,
        limits: Limits,
        api_keys: Sequence[str] = (),
        allowed_hosts: AllowedHosts | None = None,
        seed: int | None = None,
    ) -> None:
        self.model_name = model_name
        self.root = root
        self.tokenizer = tokenizer
        self.engine = engine
        self.limits = limits
        self.api_keys = tuple(key.encode() for key in api_keys)
        self.allowed_hosts = allowed_hosts
        self.texts = TokenTexts(tokenizer)
        self.metrics = Metrics(model_name, engine)
        self.started = int(time.time())
        self.draining = False  # no new requests are taken any more
        self._counting: set[asyncio.Task[None]] = set()
        self._random = random.Random(seed)
        self._grammars = grammars
        self._grammar_thread = ThreadPoolExecutor(1, "grammar")
        self._threads = ThreadPoolExecutor(_TOKENIZING_THREADS, "tokenize")
        self._unbounded_thread = ThreadPoolExecutor(1, "tokenize-only")

    # ---- asking -----------------------------------------------------------------------------------------------

    def facts(self) -> Ready:
        """What the engine said of itself.

        Raises:
            EngineUnavailable: while it has said nothing yet, and when it should take nothing any more.
        """
        if self.draining:
            raise EngineUnavailable("the server is stopping")
        if self.engine.facts is None:
            raise EngineUnavailable(self.engine.describe_state())
        return self.engine.facts

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for the name of another model."""
        if name not in (None, self.model_name):
            message = f"the model {name!r:.100} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def encode(self, text: str, *, add_special_tokens: bool = True, context: int | None = None) -> list[int]:
        """Token ids of a text. ``context``: refuse it early if it is far longer than so many tokens.

        Raises:
            UsageError: for text that no model can read.
            ApiError: 400, for a text that is far too long.
        """
        check_text(text)
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens, limit=context)
        return await self._tokenize(encode, "prompt", context, characters=len(text))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        context: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation. What says nothing in a message counts as absent; ``context`` as for ``encode``.

        Raises:
            UsageError, ModelError: for messages that are malformed or that the template refuses.
            ApiError: 400, for too many of them, and for those that are far too long.
        """
        if len(messages) > self.limits.messages:
            message = f"{len(messages)} messages in one conversation; at most {self.limits.messages} are taken"
            raise ApiError(400, message, code="invalid_value", param="messages")
        present = [
            {name: value for name, value in message.items() if value is not None and (name, value) != _NO_ANNOTATIONS}
            for message in messages
        ]
        encode = partial(
            self.tokenizer.encode_chat, present, add_generation_prompt=add_generation_prompt, limit=context
        )
        # Rendering waits for another process: that is never done in line.
        characters = max(_INLINE_CHARACTERS + 1, len(msgspec.json.encode(present)))
        return await self._tokenize(encode, "messages", context, characters=characters)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, control tokens and all."""
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await asyncio.get_running_loop().run_in_executor(self._unbounded_thread, decode)

    async def check_json_schema(self, schema: str) -> None:
        """Raise ApiError (400) for a JSON schema that no grammar can be made of."""
        if self._grammars.knows(schema):
            return
        try:
            # One at a time, and not in the threads that tokenize: they may take a quarter of a second.
            await asyncio.get_running_loop().run_in_executor(self._grammar_thread, self._grammars.check, schema)
        except UsageError as error:
            raise ApiError(400, str(error), code="invalid_value", param="response_format") from None

    async def _tokenize(
        self, encode: Callable[[], list[int]], param: str, context: int | None, *, characters: int
    ) -> list[int]:
        # What neither a context nor its own length bounds waits for its like, and no one else for it.
        threads = self._unbounded_thread if context is None and characters > _LONG_CHARACTERS else self._threads
        try:
            if characters > _INLINE_CHARACTERS:
                return await asyncio.get_running_loop().run_in_executor(threads, encode)
            await asyncio.sleep(0)  # a request may have many short prompts: others go on in between
            return encode()
        except PromptTooLong:
            message = f"the prompt has far more tokens than the context holds: {context}"
            raise ApiError(400, message, code="context_length_exceeded", param=param) from None

    def request(self, answer_id: str, prompt: Sequence[int], params: SamplingParams, salt: str) -> Request:
        """One request for the engine."""
        facts = self.facts()
        own_end = self.tokenizer.eos_token_id
        return Request(
            request_id=f"{answer_id}-{secrets.token_hex(4)}",
            prompt=tuple(prompt),
            params=params,
            seed=self._random.randint(0, MAX_SEED) if params.seed is None else params.seed,
            end_tokens=tuple(dict.fromkeys((*facts.end_tokens, *(() if own_end is None else (own_end,))))),
            arrival_time=time.monotonic(),
            cache_salt=salt,
        )

    def begin(self, requests: list[Request]) -> list[RequestStream]:
        """Put requests into the engine; ``end`` them in any case.

        Raises:
            EngineUnavailable, QueueFull: if they cannot be taken now.
        """
        try:
            return self.engine.add(requests)
        except NanoserveError:
            self.metrics.rejected()
            raise

    def end(self, streams: list[RequestStream]) -> None:
        """The reader is done with them; what still runs is aborted."""
        for stream in streams:
            self.engine.forget(stream)
        self._counting = {task for task in self._counting if not task.done()}
        self._counting.add(asyncio.ensure_future(self._count(streams)))

    async def _count(self, streams: list[RequestStream]) -> None:
        for stream in streams:
            self.metrics.ended(stream)
            await asyncio.sleep(0)  # there is an entry for each token: others go on in between

    def close(self) -> None:
        """Give threads and the template's process back."""
        for threads in (self._threads, self._unbounded_thread, self._grammar_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self.tokenizer.close()
        self._grammars.close()


def cache_salt(key: bytes | None) -> str:
    """Clients share cached prefixes with those of the same key: the times of others' prompts tell nothing."""
    return "" if key is None else hashlib.blake2b(key, digest_size=16).hexdigest()
