"""``response_format`` over HTTP, through OpenAI's own client."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.starting import Server
from tests.text.grammar.schemas import PERSON, meets

MODEL = "storyteller"
STORY: list[Any] = [{"role": "user", "content": "Tell me a story about a cat and a boat."}]


def formatted(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize("strict", [True, False, None])
def test_an_answer_meets_its_schema(client: openai.OpenAI, *, strict: bool | None) -> None:
    format_: Any = formatted(PERSON, strict=strict, description="someone")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=STORY,
        n=2,
        temperature=2.0,
        seed=1,
        logprobs=True,
        response_format=format_,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert meets(json.loads(choice.message.content or ""), PERSON)
        assert choice.logprobs is not None and choice.logprobs.content


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": STORY,
        "seed": 6,
        "response_format": formatted(PERSON),
    }
    whole = client.chat.completions.create(**settings).choices[0].message.content
    chunks = list(client.chat.completions.create(**settings, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_object(client: openai.OpenAI) -> None:
    """Without limits of its own a text may be cut off by max_tokens, and is the beginning of an
    object then."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=STORY,
        n=4,
        seed=1,
        max_tokens=60,
        response_format={"type": "json_object"},
    )
    for choice in answer.choices:
        text = choice.message.content or ""
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)
        else:
            assert choice.finish_reason == "length" and text.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_fails_after_many_tokens_is_an_error_of_the_request(
    client: openai.OpenAI, *, stream: bool
) -> None:
    """It has a million parts; more are built with every token, until the limit of one grammar."""
    format_: Any = formatted({"type": "string", "pattern": "^(a{1,1000}){300,1000}$"})
    with pytest.raises(openai.APIError, match="the JSON schema cannot be followed: ") as caught:
        answer: Any = client.chat.completions.create(
            model=MODEL, messages=STORY, max_tokens=900, response_format=format_, stream=stream
        )
        list(answer)
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error" and body["code"] == "invalid_value"
    assert stream or isinstance(caught.value, openai.BadRequestError)


def test_plain_text_stays_as_it_was(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": STORY,
        "temperature": 0,
        "max_tokens": 8,
    }
    plain = client.chat.completions.create(**settings).choices[0].message.content
    same = (
        client.chat.completions.create(**settings, response_format={"type": "text"})
        .choices[0]
        .message.content
    )
    assert same == plain


@pytest.mark.parametrize(
    ("format_", "param", "message"),
    [
        ({"type": "grammar"}, "response_format.type", "not supported"),
        ({"type": "json_schema"}, "response_format.json_schema", "is missing"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            "response_format.json_schema.schema",
            "is missing",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {}}},
            "response_format.json_schema.name",
            "is missing",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}},
            "response_format.json_schema.schema",
            "Expected",
        ),
        (
            {"type": "json_object", "json_schema": {"name": "a", "schema": {}}},
            "response_format.json_schema",
            "needs",
        ),
        (formatted({}, guided="x"), "response_format.json_schema.guided", "not supported"),
        (formatted({"type": "poem"}), "response_format", "Invalid type: poem"),
        (formatted({"$ref": "#"}), "response_format", "refers to itself without end"),
        (formatted({"$ref": "http://127.0.0.1:9/x.json"}), "response_format", "does not fetch"),
        (
            formatted({"type": "integer", "multipleOf": 123_456_789}),
            "response_format",
            "too complex",
        ),
        (
            formatted({"enum": [f"value {i}" for i in range(40_000)]}),
            "response_format",
            "at most 65536 are taken",
        ),
        (
            formatted(json.loads('{"items":' * 300 + "{}" + "}" * 300)),
            "response_format",
            "recursion limit",
        ),
    ],
    ids=str,
)
def test_what_is_answered_400(
    server: Server, format_: dict[str, Any], param: str, message: str
) -> None:
    answer = server.post("/v1/chat/completions", {"messages": STORY, "response_format": format_})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and message in error["message"]


def test_answers_are_right_while_bombs_are_refused(server: Server, client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": STORY,
        "seed": 2,
        "response_format": formatted(PERSON),
    }
    alone = client.chat.completions.create(**settings).choices[0].message.content
    bomb = {
        "messages": STORY,
        "response_format": formatted({"type": "integer", "multipleOf": 123_456_789}),
    }
    with ThreadPoolExecutor(2) as pool:
        bombs = [pool.submit(server.post, "/v1/chat/completions", bomb) for _ in range(2)]
        assert client.chat.completions.create(**settings).choices[0].message.content == alone
        assert [bomb.result().status_code for bomb in bombs] == [400, 400]
    server.wait_idle()
