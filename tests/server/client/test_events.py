"""Streams of servers that nobody can vouch for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.server.client.events import (
    LONGEST_LINE,
    BrokenStream,
    Chunk,
    EventReader,
    error_facts,
)
from tests.server.client.foreign import HELLO


def texts(chunks: list[Chunk]) -> list[str]:
    return [choice.answer for chunk in chunks for choice in chunk.choices or ()]


@given(st.lists(st.integers(1, 40)))
def test_however_the_bytes_are_divided_the_chunks_are_the_same(lengths: list[int]) -> None:
    reader, data, chunks = EventReader(), HELLO.body, []
    for length in [*lengths, len(data)]:
        chunks += reader.push(data[:length])
        data = data[length:]
    assert texts(chunks) == ["", "Hello", " there", ""]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 2
    assert reader.done


def test_other_dialects() -> None:
    reader = EventReader()
    stream = (
        b": a comment\r\nevent: x\r\nid: 3\r\n"
        b'data:{"choices":null,"usage":null,"id":7}\r\n\r\n'
        b'data: {"choices":[{"text":"a","index":0,"logprobs":{}}]}\r\n\r\n'
        b'data: {"choices":[{"delta":{"reasoning_content":"hm","content":null}}]}\n'
        b'data: {"choices":[{"delta":{"reasoning":"so","role":"assistant"},"finish_reason":"stop"}]}\n'
    )
    chunks = list(reader.push(stream))
    assert texts(chunks) == ["a", "", ""]
    assert [choice.thinking for chunk in chunks for choice in chunk.choices or ()] == [
        "",
        "hm",
        "so",
    ]
    assert not reader.done


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"3",
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{"delta": "x"}]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_junk_is_the_servers_fault(line: bytes) -> None:
    with pytest.raises(BrokenStream):
        list(EventReader().push(b"data: " + line + b"\n\n"))


def test_the_json_of_an_event_may_be_on_several_lines() -> None:
    # The standard of server-sent events joins the data lines of an event with line feeds; a blank
    # line ends it.
    stream = (
        b'data: {"choices":\r\ndata: [{"text": "a"}]\r\n: a comment\r\ndata: }\r\n\r\n'
        b'data: {\ndata:\ndata:   "choices": [{"text": "b"}]}\n\ndata: {"choices": [{"text": "c"}]}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, len(stream)):
        reader, chunks = EventReader(), []
        for start in range(0, len(stream), size):
            chunks += reader.push(stream[start : start + size])
        assert texts(chunks) == ["a", "b", "c"] and reader.done


@pytest.mark.parametrize("end", [b"\n", b"data: [DONE]\n"])
def test_an_event_that_ends_before_its_json_is_the_servers_fault(end: bytes) -> None:
    with pytest.raises(BrokenStream, match="makes no sense"):
        list(EventReader().push(b'data: {"choices":\ndata: [\n' + end))


def test_an_event_without_an_end_is_not_collected_for_ever() -> None:
    reader = EventReader()
    with pytest.raises(BrokenStream, match="a line of more than"):
        for _ in range(3):
            list(reader.push(b'data: {"x": [' + b"1," * (LONGEST_LINE // 4) + b"\n"))


def test_a_line_without_an_end_is_not_collected_for_ever() -> None:
    reader = EventReader()
    with pytest.raises(BrokenStream, match="a line of more than"):
        for _ in range(3):
            list(reader.push(b"x" * (LONGEST_LINE // 2)))


@pytest.mark.parametrize(
    ("body", "message", "code"),
    [
        ('{"error": {"message": "no", "code": "bad", "type": "t"}}', "no", "bad"),
        ('{"error": {"message": "no", "code": 400, "type": "t"}}', "no", "t"),
        ('{"error": "no"}', "no", None),
        ('{"detail": "Not Found"}', "Not Found", None),
        ('{"message": "no"}', "no", None),
    ],
)
def test_what_servers_say_when_something_is_wrong(
    body: str, message: str, code: str | None
) -> None:
    facts = error_facts(json.loads(body))
    assert facts is not None
    assert (facts.message, facts.code) == (message, code)


@pytest.mark.parametrize(
    "body", ["{}", "[]", "3", '{"error": 7}', '{"error": {"message": 3}}', "null"]
)
def test_errors_that_say_nothing(body: str) -> None:
    assert error_facts(json.loads(body)) is None
