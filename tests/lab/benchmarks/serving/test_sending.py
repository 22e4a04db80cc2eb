"""One request at a time against servers that answer what is written down here."""

import asyncio
import itertools
import json
import socket
import time
from typing import Any

import pytest

from nanoserve.lab.benchmarks.serving.records import LoadRun, RequestRecord, peak_concurrency
from nanoserve.lab.benchmarks.serving.requests import RequestStyle
from nanoserve.lab.benchmarks.serving.sending import Sender, send_all
from nanoserve.request import RequestShape
from nanoserve.server.client.address import ServerAddress, parse_url
from nanoserve.server.client.connection import ApiClient
from tests.server.client.foreign import (
    Foreign,
    Scripted,
    as_error,
    as_json,
    as_stream,
    foreign,
    said,
    used,
)

SHAPE = RequestShape(5, 3)
CHAT = RequestStyle(model="parrot", endpoint="chat")
COMPLETION = RequestStyle(model="parrot")
DONE = as_stream(said("a"), said(""), said("b"), said("c", "stop"), used(9, 3))


def piece(text: str, reason: str | None = None) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


def record_of(
    server: Foreign, style: RequestStyle = CHAT, api_key: str | None = None
) -> RequestRecord:
    sender = Sender(ApiClient(parse_url(server.url), api_key), style.path, timeout=60.0)
    (request,) = style.prepare([SHAPE], "salt")
    return asyncio.run(sender.send(request, 1.0, itertools.count(0.0).__next__))


def test_a_complete_answer() -> None:
    with foreign(chat=DONE) as server:
        record = record_of(server, api_key="k")
    assert record.failure is None
    assert (record.input_tokens, record.output_tokens, record.wanted_tokens, record.counted) == (
        9,
        3,
        3,
        True,
    )
    assert len(record.text_times) == 3  # of four pieces one is empty
    assert (record.scheduled, record.started) == (1.0, 0.0)
    assert record.started < record.text_times[0] <= record.ended
    asked = server.asked[-1]
    assert asked.headers["authorization"] == "Bearer k"
    assert (asked.body["max_tokens"], asked.body["temperature"], asked.body["ignore_eos"]) == (
        3,
        0,
        True,
    )
    assert len(asked.body["messages"][0]["content"].split()) == 5


def test_completions_are_asked_with_token_ids() -> None:
    answer = as_stream(piece("a"), piece("", "length"), used(5, 3))
    with foreign(completions=answer) as server:
        record = record_of(server, COMPLETION)
        record_of(server, RequestStyle(model="dummy:big", ignore_eos=False))
    assert record.failure is None and record.output_tokens == 3
    plain, dummy = server.bodies("/v1/completions")
    assert len(plain["prompt"]) == 5 and all(300 <= token < 4000 for token in plain["prompt"])
    assert "logit_bias" not in plain
    assert len(dummy["logit_bias"]) == 32 and "ignore_eos" not in dummy


def test_prompts_are_those_of_their_salt() -> None:
    for style in (CHAT, COMPLETION):
        first, again, other = (style.prepare([SHAPE] * 3, salt) for salt in ("a", "a", "b"))
        assert first == again
        bodies = {request.body for request in (*first, *other)}
        assert len(bodies) == 6


def test_without_usage_pieces_are_counted() -> None:
    with foreign(chat=as_stream(said("a"), said("b"), said("", "stop"))) as server:
        record = record_of(server)
    assert (record.output_tokens, record.input_tokens, record.counted) == (2, 5, False)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (as_error(429, "the queue\nis\x1b[2J full"), "HTTP 429: the queue is\ufffd[2J full"),
        (Scripted(500, b"<html>"), "HTTP 500"),
        (as_stream(said("a"), dies=True), "the connection ended half-way"),
        (as_stream(said("a"), done=False), "a stream without an end"),
        (as_stream(said("a"), {"error": {"message": "boom"}}), "an error within the stream: boom"),
        (as_stream("{"), "a stream that makes no sense"),
        (as_stream(said("", "stop"), used(5, 0)), "an answer without a token"),
        (as_json({"choices": []}), "an answer that is no stream"),
    ],
)
def test_failures_have_names(answer: Scripted, failure: str) -> None:
    with foreign(chat=answer) as server:
        record = record_of(server)
    assert record.failure == failure
    assert record.output_tokens == 0 and record.ended > record.started


def test_servers_that_are_not_there_or_say_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = ServerAddress("http", "127.0.0.1", silent.getsockname()[1])
        patient, sender = (
            Sender(ApiClient(address), "/completions", timeout=timeout) for timeout in (240.0, 0.2)
        )
        (request,) = COMPLETION.prepare([SHAPE], "salt")
        assert (
            asyncio.run(patient.send(request, 0.0, time.perf_counter)).failure
            == "Connection refused"
        )
        silent.listen()
        assert (
            asyncio.run(sender.send(request, 0.0, time.perf_counter)).failure
            == "no complete answer within 0.2 s"
        )


def test_an_open_loop_keeps_to_its_schedule_and_a_closed_loop_to_its_clients() -> None:
    with foreign(chat=DONE) as server:
        sender = Sender(ApiClient(parse_url(server.url)), CHAT.path, timeout=60.0)
        requests = CHAT.prepare([SHAPE] * 6, "salt")
        load = LoadRun()
        asyncio.run(send_all(sender, requests, [0.05, 0.0, 0.1, 0.1, 0.0, 0.15], load))
        records = load.records
        assert sorted(record.scheduled for record in records) == [0.0, 0.0, 0.05, 0.1, 0.1, 0.15]
        assert all(record.started >= record.scheduled for record in records)
        found = LoadRun()
        asyncio.run(send_all(sender, requests, [0.0] * 6, found, clients=2))
        assert peak_concurrency(found.records) == 2
        assert (len(found.records), found.unfinished) == (6, 0)
        assert found.seconds == max(record.ended for record in found.records)
    assert {json.dumps(body) for body in server.bodies("/v1/chat/completions")} == {
        json.dumps(json.loads(request.body)) for request in requests
    }


def test_a_load_that_is_ended_keeps_the_answers_it_has() -> None:
    found = LoadRun()

    async def ended_early(sender: Sender) -> None:
        async with asyncio.timeout(0.5):
            await send_all(sender, CHAT.prepare([SHAPE] * 3, "salt"), [0.0, 0.0, 60.0], found)

    with foreign(chat=DONE) as server:
        sender = Sender(ApiClient(parse_url(server.url)), CHAT.path, timeout=60.0)
        with pytest.raises(TimeoutError):
            asyncio.run(ended_early(sender))
    assert (len(found.records), found.unfinished) == (2, 1)
    assert found.seconds >= 0.5
