"""Chunks of a stream as a client gets them, chunk by chunk, in this process: the engine's updates are made
by hand."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from nanoserve.engine.outputs import MAX_DELTAS
from nanoserve.errors import RuntimeFailure
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.server import endpoints
from nanoserve.server.answers import ChatFormat, CompletionFormat, TextFormat
from nanoserve.server.messages import SampleUpdate
from nanoserve.server.schemas import ChatRequest, CompletionRequest, SamplingFields, parse
from nanoserve.server.streams import RequestStream
from nanoserve.text.answers.forms import PLAIN, AnswerParser

CHAT = parse(b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true}', ChatRequest)
COMPLETION = parse(b'{"prompt": "Hi", "stream": true}', CompletionRequest)


class Letters:
    """Token k reads as the k-th letter."""

    special_ids: frozenset[int] = frozenset()
    markers = ()
    vocab_size = 27

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)

    def is_byte(self, token_id: int) -> bool:
        return False


class Client:
    """Reads an answer of one prompt; sees each chunk when it is sent."""

    def __init__(self, asked: SamplingFields = CHAT, **params: Any) -> None:
        letters = Letters()
        texts: Any = None  # of log probabilities, which nobody asks for
        answer: CompletionFormat = (
            ChatFormat("letters", texts, partial(AnswerParser, PLAIN, {}))
            if asked is CHAT
            else TextFormat("letters", texts, letters)
        )
        request = Request("r", (1, 2), SamplingParams(**params), seed=0)
        self.stream = RequestStream(request, letters, asyncio.Event())
        service: Any = None
        self._answer = endpoints.CompletionAnswer(service, asked, answer, [self.stream])
        self.chunks: list[Any] = []

    def step(
        self,
        *tokens: int,
        index: int = 0,
        ending: FinishReason | None = None,
        error: str | None = None,
    ) -> None:
        """The engine tells of a step."""
        self.stream.take(
            SampleUpdate("r", index, tokens, started=0.0, finish_reason=ending, error=error)
        )

    async def _read(self) -> None:
        async for chunk in self._answer.chunks():
            self.chunks.append(chunk)

    def read(self, script: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return all that the client has got, while the script tells the engine's part."""

        async def both() -> None:
            reading = asyncio.create_task(self._read())
            await script()
            await reading

        asyncio.run(asyncio.wait_for(both(), 10))
        return [chunk["choices"][0] for chunk in self.chunks]


def deltas(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for choice in choices]


async def _let_read() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_chunk_of_a_chat_comes_with_the_first_text() -> None:
    client = Client()

    async def script() -> None:
        await _let_read()
        assert client.chunks == [], "clients take the first chunk for the first token"
        client.step(0)
        await _let_read()
        assert len(client.chunks) == 1
        client.step(1, ending=FinishReason.LENGTH)

    choices = client.read(script)
    assert deltas(choices) == [{"role": "assistant", "content": "a"}, {"content": "b"}]
    assert [choice["finish_reason"] for choice in choices] == [None, "length"]


def test_an_answer_without_text_has_its_role_and_each_choice_has_its_own() -> None:
    client = Client(n=2)

    async def script() -> None:
        client.step(ending=FinishReason.STOP)
        client.step(3, index=1, ending=FinishReason.LENGTH)

    choices = client.read(script)
    assert [(choice["index"], choice["delta"]) for choice in choices] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": "d"}),
    ]


def test_steps_that_came_together_are_chunks_of_their_own() -> None:
    """The front end may be busy while several steps are told of."""
    for asked in (CHAT, COMPLETION):
        client = Client(asked)

        async def script(client: Client = client) -> None:
            for token in range(20):
                client.step(token)
            client.step(20, ending=FinishReason.LENGTH)

        choices = client.read(script)
        texts = [
            choice["text"] if asked is COMPLETION else choice["delta"]["content"]
            for choice in choices
        ]
        assert texts == [chr(ord("a") + token) for token in range(21)]
        assert [choice["finish_reason"] for choice in choices] == [None] * 20 + ["length"]


def test_what_a_slow_reader_has_not_taken_is_merged() -> None:
    client, steps = Client(), 10 * MAX_DELTAS

    async def script() -> None:
        for step in range(steps):
            client.step(step % 26)
        client.step(0, ending=FinishReason.LENGTH)

    choices = client.read(script)
    assert len(choices) == MAX_DELTAS
    text = "".join(delta["content"] for delta in deltas(choices))
    assert text == "".join(chr(ord("a") + step % 26) for step in range(steps)) + "a"
    assert choices[-1]["finish_reason"] == "length"


def test_what_came_before_an_error_is_sent_before_it() -> None:
    client = Client()

    async def script() -> None:
        client.step(0)
        client.step(ending=FinishReason.ERROR, error="no memory")

    with pytest.raises(RuntimeFailure, match=r"^no memory$"):
        client.read(script)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in client.chunks] == ["a"]


def test_a_prompt_is_copied_for_a_sample_with_its_first_update() -> None:
    copies = 0

    class Prompt(tuple[int, ...]):
        def __iter__(self) -> Iterator[int]:
            nonlocal copies
            copies += 1
            return super().__iter__()

    request = Request("r", Prompt(range(300, 400)), SamplingParams(n=16, max_tokens=9), seed=0)
    stream = RequestStream(request, Letters(), asyncio.Event())
    assert stream.resumed().request.resumed == () and copies == 0
    for token in (5, 6):
        stream.take(SampleUpdate("r", 3, (token,), started=0.0))
    assert copies == 1
    assert stream.resumed().request.resumed == ((),) * 3 + ((5, 6),) + ((),) * 12
