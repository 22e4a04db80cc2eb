"""The state that endpoints share: tokenizer, engine and limits, and the steps from a prompt to a
running request."""

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import msgspec

from nanoserve.errors import NanoserveError, UsageError, shown
from nanoserve.request import MAX_SEED, Request, SamplingParams
from nanoserve.server.answers import in_pieces, token_texts
from nanoserve.server.engine_client import EngineClient, EngineUnavailable
from nanoserve.server.http_bodies import ApiError
from nanoserve.server.messages import EngineFacts
from nanoserve.server.metrics import Metrics
from nanoserve.server.streams import RequestStream
from nanoserve.text.chat_template import LONG_CONVERSATION, check_text
from nanoserve.text.grammar.checker import GrammarChecker
from nanoserve.text.tokenizer import PromptTooLong, Tokenizer

# longer texts are tokenized in a thread, because other requests would wait too long
_INLINE_CHARACTERS = 4096
_LONG_CHARACTERS = 32768
_NO_ANNOTATIONS: tuple[str, list[object]] = ("annotations", [])
"""A field of every answer in OpenAI's client, which sends it back in the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits on one client's use of the server."""

    body_bytes: int = 1 << 20  # longest body of a request
    # time in which a client must send its request, or must read more of its answer
    client_seconds: float = 30.0
    request_seconds: float = 1800.0  # time from the request to the end of its answer
    prompts: int = 128  # prompts in one completion request
    messages: int = 4096  # messages in one conversation


@dataclass(kw_only=True, eq=False)
class Service:
    model_name: str  # the name under which the model is served; ``root`` is its own
    root: str
    tokenizer: Tokenizer
    engine: EngineClient
    grammars: GrammarChecker
    limits: ClientLimits
    api_keys: Sequence[str] = field(default=(), repr=False)
    """Every client must show one of them; empty if no key is needed."""
    allowed_hosts: Collection[str] | None = None
    """Names by which clients may address the server; None allows every name."""
    seed: InitVar[int | None] = None  # makes repeatable the seeds of requests that come without one

    def __post_init__(self, seed: int | None) -> None:
        self.text_of = token_texts(self.tokenizer)
        self.metrics = Metrics(self.model_name, self.engine)
        self.started = int(time.time())
        self.draining = False  # true once the server takes no new requests
        self._counting: set[asyncio.Task[None]] = set()
        self._random = random.Random(seed)
        self._grammar_thread = ThreadPoolExecutor(1, "grammar")
        self._threads = ThreadPoolExecutor(2, "tokenize")
        # Long texts without a bound and conversations of many messages, so that they delay only
        # each other.
        self._unbounded_thread = ThreadPoolExecutor(1, "tokenize-only")

    def facts(self) -> EngineFacts:
        """The engine's facts about the model. Raises EngineUnavailable before the engine has
        reported them, and while the server stops."""
        if self.draining:
            raise EngineUnavailable("the server is stopping")
        if self.engine.facts is None:
            raise EngineUnavailable(self.engine.describe_state())
        return self.engine.facts

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence in tokens; None before the engine is ready."""
        if self.engine.facts is None:
            return None
        return self.engine.facts.max_model_len

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) for the name of another model."""
        if name not in (None, self.model_name):
            message = (
                f"the model {shown(name)} does not exist; this server has {shown(self.model_name)}"
            )
            raise ApiError(404, message, code="model_not_found", param="model")

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, context: int | None = None
    ) -> list[int]:
        """Token ids. Raises UsageError for invalid Unicode, and early ApiError (400) if far more
        than ``context``."""
        check_text(text)
        encode = partial(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens, limit=context
        )
        threads: ThreadPoolExecutor | None = self._threads
        if len(text) <= _INLINE_CHARACTERS:
            threads = None
        elif context is None and len(text) > _LONG_CHARACTERS:
            threads = self._unbounded_thread
        return await self._tokenize(encode, "prompt", context, threads)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, context: int | None = None, **settings: Any
    ) -> list[int]:
        """Token ids of a conversation; ``context`` as for ``encode``. `Tokenizer.encode_chat` takes
        the settings.

        Raises UsageError or ModelError for messages that are malformed or that the template
        refuses, and ApiError (400) if there are too many of them or they are far too long.
        """
        if len(messages) > self.limits.messages:
            message = (
                f"{len(messages)} messages in one conversation; at most {self.limits.messages} are "
                "taken"
            )
            raise ApiError(400, message, code="invalid_value", param="messages")
        given = [
            {name: value for name, value in message.items() if (name, value) != _NO_ANNOTATIONS}
            for message in messages
        ]
        encode = partial(self.tokenizer.encode_chat, given, limit=context, **settings)
        is_long = context is None and len(msgspec.json.encode([given, settings])) > _LONG_CHARACTERS
        # Rendering waits for another process, so it always runs in a thread.
        threads = self._threads
        if is_long or len(given) > LONG_CONVERSATION:
            threads = self._unbounded_thread
        return await self._tokenize(encode, "messages", context, threads)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        decode = partial(self.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(self._unbounded_thread, decode)

    async def check_json_schema(self, schema: str, param: str) -> None:
        """Raise ApiError (400), for this field, for a JSON schema that cannot become a grammar."""
        if self.grammars.knows(schema):
            return
        try:
            # One at a time, and not in the threads that tokenize: a check may take a quarter of a
            # second.
            await asyncio.get_running_loop().run_in_executor(
                self._grammar_thread, self.grammars.check, schema
            )
        except UsageError as error:
            raise ApiError(400, str(error), code="invalid_value", param=param) from None

    async def _tokenize(
        self,
        encode: Callable[[], list[int]],
        param: str,
        context: int | None,
        threads: ThreadPoolExecutor | None,
    ) -> list[int]:
        """Token ids, encoded in one of the threads, or at once if None."""
        try:
            if threads is not None:
                return await asyncio.get_running_loop().run_in_executor(threads, encode)
            # a request may have many short prompts; other requests run in between
            await asyncio.sleep(0)
            return encode()
        except PromptTooLong:
            message = f"the prompt has far more tokens than the context holds: {context}"
            raise ApiError(400, message, code="context_length_exceeded", param=param) from None

    def request(
        self, answer_id: str, prompt: Sequence[int], params: SamplingParams, key: bytes | None
    ) -> Request:
        """One request for the engine, from a client with this API key."""
        seed = params.seed
        if seed is None:
            seed = self._random.randint(0, MAX_SEED)
        # A salt for each API key, so that response times reveal nothing about the prompts of other
        # keys.
        salt = ""
        if key is not None:
            salt = hashlib.blake2b(key, digest_size=16).hexdigest()
        return Request(
            request_id=f"{answer_id}-{secrets.token_hex(4)}",
            prompt=tuple(prompt),
            params=params,
            seed=seed,
            end_tokens=self.tokenizer.end_tokens(self.facts().end_tokens),
            arrival_time=time.monotonic(),
            cache_salt=salt,
        )

    def begin(self, requests: list[Request]) -> list[RequestStream]:
        """Give requests to the engine; ``end`` their streams in any case. Raises EngineUnavailable
        or QueueFull."""
        try:
            return self.engine.add(requests)
        except NanoserveError:
            self.metrics.rejected()
            raise

    def end(self, streams: Sequence[RequestStream]) -> None:
        """Drop streams whose reader is done, and abort the requests that still run."""
        for stream in streams:
            self.engine.forget(stream)
        self._counting = {task for task in self._counting if not task.done()}
        self._counting.add(asyncio.ensure_future(self._count(streams)))

    async def _count(self, streams: Sequence[RequestStream]) -> None:
        for stream in streams:
            # there is one for each token; other requests run in between
            async for gaps in in_pieces(stream.gaps):
                self.metrics.passed(gaps)
            self.metrics.ended(stream)
            await asyncio.sleep(0)

    def end_processes(self) -> None:
        """End the processes of templates and grammars at once; requests that need them fail from
        now on."""
        self.tokenizer.close()
        self.grammars.close()

    def close(self) -> None:
        for threads in (self._threads, self._unbounded_thread, self._grammar_thread):
            threads.shutdown(wait=False, cancel_futures=True)
