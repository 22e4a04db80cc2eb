"""The largest legal request holds no one up: what it costs is bounded, shared between its prompts,
or in slices."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, MutableMapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

from nanoserve.request import (
    MAX_STOP_TOKENS,
    CompletionOutput,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.server import endpoints
from nanoserve.server.answers import PIECE, ChatFormat, CompletionFormat, TextFormat, TokenText
from nanoserve.server.engine_process import COMMAND_BYTES, COMMAND_SAMPLES, receive
from nanoserve.server.http_bodies import PIECE_BYTES, ApiError, JsonResponse
from nanoserve.server.messages import Add, Command, EngineFacts, Mailbox
from nanoserve.server.schemas import (
    MAX_LOGPROBS_PER_REQUEST,
    ChatRequest,
    CompletionRequest,
    chat_params,
    completion_params,
    parse,
)
from nanoserve.server.service import ClientLimits, Service
from nanoserve.text.answers.forms import AnswerParser, TaggedAnswers
from nanoserve.text.chat_template import LONG_CONVERSATION
from nanoserve.text.tokenizer import Tokenizer, load_tokenizer
from nanoserve.utils.sockets import connect, listen, local_address
from tests.text.building import make_byte_level

FACTS = EngineFacts(1024, 4096, (0,), SamplingParams(), 256)
LARGEST = {
    "stop_token_ids": list(range(MAX_STOP_TOKENS)),
    "logit_bias": {str(token): -1.0 for token in range(1024)},
    "stop": [chr(65 + index) * 1024 for index in range(16)],
    "n": 16,
}


def _asked(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "a"} | fields).encode(), CompletionRequest)


def test_a_long_list_of_stop_tokens_is_refused_by_name() -> None:
    with pytest.raises(ApiError, match="stop_token_ids may name at most 1024") as caught:
        completion_params(_asked(stop_token_ids=list(range(4096)) * 40), FACTS, [1] * 128)
    assert caught.value.param == "stop_token_ids"


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 24}])
def test_prompts_of_one_request_share_their_parameters(fields: dict[str, Any]) -> None:
    lengths = [*range(900, 1000), *range(28)]
    each = completion_params(_asked(**LARGEST, **fields), FACTS, lengths)
    assert len(each) == 128 and len({id(params) for params in each}) == 1
    crowded = completion_params(_asked(**LARGEST), FACTS, range(896, 1024))
    assert [params.max_tokens for params in crowded] == [
        min(16, 1024 - length) for length in range(896, 1024)
    ]
    assert len({id(params) for params in crowded}) == 16


def test_samples_share_stop_tokens() -> None:
    params = completion_params(_asked(**LARGEST), FACTS, [1])[0]
    scheduler = Scheduler(ChunkedPrefill(64), num_blocks=32, block_size=4, max_model_len=64)
    scheduler.add(Request("a", (5,), params, 0))
    sequences = scheduler.table.unfinished("a")
    assert len(sequences) == 16 and len({id(sequence.stop_tokens) for sequence in sequences}) == 1


@pytest.mark.parametrize("fields", [LARGEST, {"n": 16}])
def test_the_engine_takes_commands_in_slices(tmp_path: Path, fields: dict[str, Any]) -> None:
    context = zmq.Context()
    address, commands = local_address(tmp_path), context.socket(zmq.PAIR)
    key = listen({address: commands})
    mailbox: Mailbox[Command] = Mailbox(zmq.Context(), Command)
    connect(mailbox.socket, address, key)
    params = completion_params(_asked(**fields), FACTS, [1])[0]
    sent = [
        msgspec.msgpack.encode(Add(Request(str(number), (5,), params, 0))) for number in range(128)
    ]
    for command in sent:
        commands.send(command)
    received: list[list[str]] = []
    while sum(map(len, received)) < 128:
        slice_ = [command for command in receive(mailbox, 5.0) if isinstance(command, Add)]
        received.append([command.request.request_id for command in slice_])
    mailbox.close()
    context.destroy(linger=0)
    assert [name for names in received for name in names] == [str(number) for number in range(128)]
    most = min(COMMAND_BYTES // len(sent[0]) + 1, COMMAND_SAMPLES // 16)
    assert max(map(len, received)) <= most < 128


def test_log_probabilities_of_one_request_are_bounded() -> None:
    asked = _asked(n=16, logprobs=20, max_tokens=1000)
    with pytest.raises(
        ApiError, match=f"more than {MAX_LOGPROBS_PER_REQUEST} in one request"
    ) as caught:
        completion_params(asked, FACTS, [1] * 128)
    assert caught.value.param == "logprobs"
    assert completion_params(asked, FACTS, [1] * 12)
    chat = ChatRequest(messages=[], logprobs=True, top_logprobs=20)
    assert (
        chat_params(chat, msgspec.structs.replace(FACTS, max_model_len=131_072), 1).max_tokens
        == 131_071
    )


def test_the_choices_of_an_answer_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = tuple(
        CompletionOutput(index, "a", (5,), None, "stop", None, None) for index in range(16)
    )  # type: ignore[arg-type]
    made: list[int] = []
    seen: list[int] = []

    class Counting(TextFormat):
        async def choice(
            self,
            index: int,
            request: RequestOutput,
            output: CompletionOutput,
            name: str = "message",
        ) -> dict[str, Any]:
            made.append(index)
            return await super().choice(index, request, output, name)

    async def outputs(_streams: object) -> list[RequestOutput]:
        return [
            RequestOutput(str(number), None, (1,), samples, True, 0, None) for number in range(128)
        ]

    async def other() -> None:
        while len(made) < 128 * 16:
            seen.append(len(made))
            await asyncio.sleep(0)

    async def both() -> dict[str, Any]:
        monkeypatch.setattr(endpoints, "wholes", outputs)
        streams: Any = [SimpleNamespace(request=Request("a", (1,), SamplingParams(n=16), 0))] * 128
        service = cast(Service, SimpleNamespace(limits=ClientLimits()))
        whole = endpoints.CompletionAnswer(
            service, _asked(), Counting("m", cast(Any, None), cast(Any, None)), streams
        ).whole()
        answer, _ = await asyncio.gather(whole, other())
        return cast(dict[str, Any], msgspec.json.decode(msgspec.json.encode(answer)))

    answer = asyncio.run(both())
    assert [choice["index"] for choice in answer["choices"]] == list(range(128 * 16))
    assert answer["usage"]["completion_tokens"] == 128 * 16
    assert max(after - before for before, after in pairwise(seen)) == 1


def _most_between(work: Coroutine[Any, Any, Any], done: Callable[[], int]) -> tuple[Any, int]:
    """Return the result of some work, and how much of it is done at most while nothing else
    runs."""
    seen: list[int] = [done()]

    async def other(task: "asyncio.Task[Any]") -> None:
        while not task.done():
            seen.append(done())
            await asyncio.sleep(0)
        seen.append(done())

    async def both() -> Any:
        task = asyncio.ensure_future(work)
        await other(task)
        return task.result()

    return asyncio.run(both()), max(after - before for before, after in pairwise(seen))


TOKENS = 1000
LOGPROBS = tuple(TokenLogprob(number, -1.0, 2, ((number + 1, -0.5),)) for number in range(TOKENS))


@pytest.mark.parametrize("kind", ["chat", "echo"])
def test_log_probabilities_are_put_into_an_answer_in_pieces(kind: str) -> None:
    told: list[int] = []

    def text_of(token: int) -> TokenText:
        told.append(token)
        return TokenText(str(token), str(token).encode())

    decoder: Any = SimpleNamespace(special_ids=(), vocab_size=9999, is_byte=lambda _token: False)
    decoder.decode = lambda ids, **_settings: "".join(map(str, ids))
    form: CompletionFormat
    if kind == "chat":
        form = ChatFormat("m", text_of, lambda: AnswerParser(TaggedAnswers(None, None), {}))
        prompt, scored = (5,), None
        output = CompletionOutput(
            0, "a", tuple(range(TOKENS)), LOGPROBS, "stop", None, cast(Any, None)
        )
    else:
        form = TextFormat("m", text_of, decoder, ["text"])
        prompt, scored = tuple(range(TOKENS)), (None, *LOGPROBS[1:])
        output = CompletionOutput(0, "a", (), (), "stop", None, cast(Any, None))
    request = RequestOutput("r", None, prompt, (output,), True, 0, scored)
    choice, most = _most_between(form.choice(0, request, output), lambda: len(told))
    logprobs = msgspec.json.decode(msgspec.json.encode(choice))["logprobs"]
    if kind == "chat":
        entry = {"token": "7", "logprob": -1.0, "bytes": [55]}
        assert logprobs["content"][7] == entry | {
            "top_logprobs": [{"token": "8", "logprob": -0.5, "bytes": [56]}]
        }
        assert len(logprobs["content"]) == TOKENS and most == 2 * PIECE
    else:
        assert logprobs["top_logprobs"][:2] == [None, {"2": -0.5, "1": -1.0}]
        assert list(map(len, logprobs.values())) == [TOKENS] * 4 and most == 2 * PIECE


def test_a_large_body_is_sent_in_pieces() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(dict(message))

    response = JsonResponse("x" * (5 * PIECE_BYTES), headers={"x-request-id": "r"})
    asyncio.run(response({}, cast(Any, None), send))
    assert dict(sent[0]["headers"])[b"content-length"] == str(5 * PIECE_BYTES + 2).encode()
    bodies = [message.get("body", b"") for message in sent[1:]]
    assert b"".join(bodies) == response.body and max(map(len, bodies)) == PIECE_BYTES
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (
        len(bodies) - 1
    ) + [False]


def test_the_books_of_a_request_are_kept_some_gaps_at_a_time(edge: "Edge") -> None:
    ended: list[object] = []
    passed: list[float] = []
    edge.service.engine.forget = lambda _stream: None  # type: ignore[method-assign]
    edge.service.metrics.ended = ended.append  # type: ignore[method-assign,assignment]
    edge.service.metrics.passed = passed.extend  # type: ignore[method-assign]
    streams = [SimpleNamespace(gaps=[float(number)] * 300) for number in range(128)]

    async def end() -> None:
        edge.service.end(cast(Any, streams))
        await asyncio.gather(*edge.service._counting)

    _, most = _most_between(end(), lambda: len(passed))
    assert ended == streams and sorted(passed) == [gap for stream in streams for gap in stream.gaps]
    assert most == PIECE


# -------------------------------------------------------------------------------------------------
# tokenizing


class Edge:
    """A service of which only the tokenizing half is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.service = Service(
            model_name="m",
            root="m",
            tokenizer=tokenizer,
            engine=cast(Any, SimpleNamespace(facts=FACTS)),
            grammars=cast(Any, None),
            limits=ClientLimits(messages=50),
        )

    def refuse(self, prompt: str | Sequence[dict[str, str]], context: int) -> ApiError:
        encode = self.service.encode if isinstance(prompt, str) else self.service.encode_chat
        with pytest.raises(ApiError) as caught:
            asyncio.run(encode(cast(Any, prompt), context=context))
        return caught.value


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    tokenizer = load_tokenizer(make_byte_level(tmp_path_factory.mktemp("tokenizer")))
    yield Edge(tokenizer)
    tokenizer.close()


@pytest.mark.parametrize(("context", "repeats"), [(16, 1_000), (1024, 100_000)])
def test_a_prompt_far_too_long_is_refused_in_openais_words(
    edge: Edge, context: int, repeats: int
) -> None:
    error = edge.refuse("a " * repeats, context)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    error = edge.refuse([{"role": "user", "content": "a " * repeats}], context)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")


def test_only_what_nothing_bounds_waits_for_its_like(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    encode = edge.service.tokenizer.encode

    def noting(*arguments: Any, **settings: Any) -> list[int]:
        threads.append(threading.current_thread().name.rstrip("_0123456789"))
        return encode(*arguments, **settings)

    monkeypatch.setattr(edge.service.tokenizer, "encode", noting)
    for text, context in (
        ("a", None),
        ("a " * 5_000, None),
        ("a " * 50_000, None),
        ("a " * 50_000, 1 << 20),
    ):
        asyncio.run(edge.service.encode(text, context=context))
    assert threads == ["MainThread", "tokenize", "tokenize-only", "tokenize"]


def test_a_conversation_of_many_messages_waits_for_its_like(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noting(*arguments: Any, **settings: Any) -> list[int]:
        threads.append(threading.current_thread().name.rstrip("_0123456789"))
        return []

    monkeypatch.setattr(edge.service.tokenizer, "encode_chat", noting)
    monkeypatch.setattr(edge.service, "limits", ClientLimits())
    for count in (LONG_CONVERSATION, LONG_CONVERSATION + 1):
        asyncio.run(
            edge.service.encode_chat([{"role": "user", "content": "a"}] * count, context=1 << 20)
        )
    assert threads == ["tokenize", "tokenize-only"]


def test_the_number_of_messages_is_bounded(edge: Edge) -> None:
    error = edge.refuse([{"role": "user", "content": "a"}] * 51, 1 << 20)
    assert error.status == 400 and error.param == "messages" and "at most 50" in error.message
