"""``nanoserve chat --url`` with servers of others, which may refuse, break off or talk nonsense."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoserve.commands.chat import ChatOptions, Conversation
from nanoserve.commands.chat_session import ChatSession
from nanoserve.commands.conversations import Message
from nanoserve.commands.remote_model import RemoteModel, RemoteModels
from nanoserve.commands.terminal import StopOnInterrupt
from nanoserve.errors import NanoserveError, UsageError
from nanoserve.server.client.address import parse_url
from nanoserve.server.client.connection import ApiClient, ServerLost, ServerRefused
from tests.commands.conftest import ROOT
from tests.commands.fake_llm import FakeLLM
from tests.server.client.foreign import (
    HELLO,
    Asked,
    Foreign,
    Scripted,
    as_error,
    as_json,
    as_stream,
    foreign,
    said,
    used,
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def session_with(server: Foreign, **settings: Any) -> tuple[ChatSession, list[str]]:
    notices: list[str] = []
    ticks = iter(range(100))
    model = RemoteModel(
        ApiClient(parse_url(server.url)), None, notices.append, clock=lambda: float(next(ticks))
    )
    return ChatSession(model, notify=notices.append, **settings), notices


def answer(session: ChatSession, question: str) -> str:
    return "".join(text for part, text in session.ask(question) if part == "answer")


def test_one_answer_asks_for_nothing_that_was_not_said(command: Run, fake: list[FakeLLM]) -> None:
    with foreign(chat=HELLO) as server:
        assert command("chat", "--url", server.url, stdin=b"hi\n") == (0, "Hello there\n", "")
    (body,) = server.bodies("/v1/chat/completions")
    assert body == {
        "model": "parrot",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert all("authorization" not in asked.headers for asked in server.asked)
    assert fake == []  # no model was opened here


def test_what_was_said_is_sent(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-7")
    with foreign(chat=HELLO) as server:
        words = [
            "--url",
            f"{server.url}/v1",
            "--model",
            "other",
            "--system",
            "Be kind.",
            "--seed",
            "3",
            "--stop",
            "x",
        ]
        code, _, err = command("chat", "hi", *words, "--top-k", "5", "--policy", "prefill-first")
    (body,) = server.bodies("/v1/chat/completions")
    assert code == 0
    assert (body["model"], body["seed"], body["top_k"], body["stop"]) == ("other", 3, 5, ["x"])
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert server.asked[-1].headers["authorization"] == "Bearer sk-7"
    assert err == "nanoserve: with --url these have no effect: --policy\n"


def test_json_counts_as_the_server_does(command: Run) -> None:
    with foreign(chat=HELLO) as server:
        result = json.loads(command("chat", "hi", "--url", server.url, "--json")[1])
    assert (result["text"], result["model"], result["finish_reason"]) == (
        "Hello there",
        "parrot",
        "stop",
    )
    assert result["usage"] == {
        "prompt_tokens": 7,
        "cached_tokens": None,
        "completion_tokens": 2,
        "total_tokens": 9,
    }
    assert result["timings"]["ttft_s"] > 0


def test_of_several_models_the_first_is_taken_and_named(command: Run) -> None:
    models = {"data": [{"id": "a\x1b[2J"}, {"id": "b"}]}
    with foreign(chat=HELLO, models=as_json(models)) as server:
        _, _, err = command("chat", "hi", "--url", server.url)
    assert (
        err
        == "nanoserve: the server has 2 models (a\ufffd[2J, b): this is a\ufffd[2J, --model takes "
        "another\n"
    )


@pytest.mark.parametrize(
    ("script", "code", "message"),
    [
        ({"models": as_error(401, "no key")}, 1, "answered 401: no key (give a key with --api-key"),
        ({"models": as_json({"data": []})}, 2, "the server lists no model: name one with --model"),
        ({"models": as_json({"models": []})}, 1, "is no list of models"),
        ({"models": Scripted(body=b"<html>", kind="text/html")}, 1, "did not answer with JSON"),
        ({"models": Scripted(404)}, 1, "answered 404: Not Found (/v1/models)"),
        ({"chat": as_error(404, "no such model")}, 1, "answered 404: no such model"),
        (
            {"chat": as_error(429, "too many", retry_after="7")},
            1,
            "answered 429: too many (it asks to wait 7 s)",
        ),
        ({"chat": as_error(503, "not\x1b[2J yet")}, 1, "answered 503: not\ufffd[2J yet"),
        ({"chat": Scripted(301, headers={"location": "http://elsewhere"})}, 1, "answered 301"),
        ({"chat": as_json({"choices": []})}, 1, "did not answer with a stream"),
        ({"chat": as_stream("{nonsense")}, 1, "sent a chunk that makes no sense"),
        ({"chat": Scripted(200, b"", "text/event-stream")}, 1, "ended the answer half-way"),
    ],
)
def test_what_goes_wrong_is_one_line(
    command: Run, script: dict[str, Any], code: int, message: str
) -> None:
    with foreign(**script) as server:
        found, out, err = command("chat", "hi", "--url", server.url)
    assert (found, out) == (code, "")
    assert err.startswith("nanoserve: ") and err.count("\n") == 1
    assert message in err


def test_no_server_and_no_url(command: Run) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, but nobody listens
        code, _, err = command("chat", "hi", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert (code, err.count("\n")) == (1, 1)
    assert "cannot reach http://127.0.0.1" in err and "Connection refused" in err
    assert command("chat", "hi", "--url", "localhost:8000")[0] == 2


def test_a_server_that_dies_leaves_what_it_had_said(command: Run) -> None:
    with foreign(chat=as_stream(said("Once"), said(" upon"), dies=True)) as server:
        code, out, err = command("chat", "hi", "--url", server.url)
    assert (code, out) == (1, "Once upon\n")
    assert "ended the answer half-way" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        (as_stream(said("Once"), dies=True), ServerLost),
        (as_stream(said("Once"), done=False), ServerLost),
        (as_stream(said("Once"), {"error": {"message": "boom"}}), ServerRefused),
        (as_stream(said("Once"), "]"), NanoserveError),
    ],
)
def test_half_an_answer_is_kept_and_marked(ending: Scripted, error: type[Exception]) -> None:
    with foreign(chat=ending) as server:
        session, _ = session_with(server)
        with pytest.raises(error):
            answer(session, "hi")
        assert session.turns == [
            Message("user", "hi"),
            Message("assistant", "Once", interrupted=True),
        ]
        assert session.last_answer is not None and session.last_answer.usage.completion_tokens == 1
        server.script["/v1/chat/completions"] = HELLO
        assert "".join(text for _, text in session.regenerate()) == "Hello there"
        assert [turn.content for turn in session.turns] == ["hi", "Hello there"]


def test_no_answer_at_all_leaves_the_history_as_it_was() -> None:
    with foreign(chat=as_error(500, "boom")) as server:
        session, _ = session_with(server)
        with pytest.raises(ServerRefused):
            answer(session, "hi")
        assert session.turns == []


def test_an_answer_that_is_stopped_is_counted_in_chunks() -> None:
    with foreign(chat=HELLO) as server:
        session, _ = session_with(server)
        pieces = session.ask("hi", lambda stream: iter([next(stream)]))
        assert [text for _, text in pieces] == ["Hello"]
    assert session.turns[-1] == Message("assistant", "Hello", interrupted=True)
    assert session.last_answer is not None
    assert session.last_answer.line(1.0) == "interrupted · 1 token · the first after 1.00 s"


def test_reasoning_in_either_dialect() -> None:
    for chunk in (
        said("", reasoning_content="hm"),
        said("", reasoning="hm"),
        said("<think>hm</think>"),
    ):
        with foreign(chat=as_stream(chunk, said("yes", "stop"), used(3, 2))) as server:
            session, _ = session_with(server)
            assert answer(session, "hi") == "yes"
        assert session.last_answer is not None and session.last_answer.reasoning == "hm"
        assert session.turns[-1].content == "yes"


def test_a_server_is_told_whether_the_model_reasons() -> None:
    bodies = []

    def remembered(asked: Asked) -> Scripted:
        bodies.append(asked.body)
        return HELLO

    with foreign(chat=remembered) as server:
        session, _ = session_with(server)
        answer(session, "hi")
        session.model.thinking = False
        answer(session, "hi")
    assert "chat_template_kwargs" not in bodies[0]
    assert bodies[1]["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}


def test_a_full_context_drops_the_oldest_turn_and_says_so() -> None:
    def three_messages_at_most(asked: Asked) -> Scripted:
        full = len(asked.body["messages"]) > 3
        return as_error(400, "too long", "context_length_exceeded") if full else HELLO

    with foreign(chat=three_messages_at_most) as server:
        session, notices = session_with(server)
        for question in ("one", "two", "three"):
            assert answer(session, question) == "Hello there"
    assert [turn.content for turn in session.turns[::2]] == ["two", "three"]
    assert notices == ["the server's context is full: the oldest turn was dropped"]


def test_a_server_that_loads_is_waited_for_and_then_asked_for_its_context() -> None:
    loading = as_error(503, "the model is loading", retry_after="7")
    notices: list[str] = []
    pauses: list[float] = []
    with foreign(
        chat=loading, models=as_json({"data": [{"id": "parrot", "max_model_len": None}]})
    ) as server:

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                server.script["/v1/chat/completions"] = HELLO
                server.script["/v1/models"] = as_json(
                    {"data": [{"id": "parrot", "max_model_len": 40}]}
                )

        model = RemoteModel(ApiClient(parse_url(server.url)), None, notices.append, sleep=sleep)
        session = ChatSession(model, notify=notices.append)
        assert model.context is None
        assert answer(session, "hi") == "Hello there"
        assert (model.context, pauses) == (40, [7, 7, 7])
        assert notices == [
            f"{server.url} answered 503: the model is loading (it asks to wait 7 s): "
            "asking again until it answers, Ctrl-C gives up"
        ]
        assert len(server.bodies("/v1/models")) == 2


def test_a_server_that_loads_for_ever_is_given_up() -> None:
    pauses: list[float] = []
    with foreign(chat=as_error(503, "the model is loading", retry_after="600")) as server:
        model = RemoteModel(ApiClient(parse_url(server.url)), None, print, sleep=pauses.append)
        with pytest.raises(ServerRefused, match="the model is loading"):
            answer(ChatSession(model, notify=print), "hi")
    assert pauses == [600, 600, 600]


def test_ctrl_c_ends_the_wait() -> None:
    def interrupted(_: float) -> None:
        signal.raise_signal(signal.SIGINT)

    notices: list[str] = []
    with (
        foreign(chat=as_error(503, "the model is loading", retry_after="7")) as server,
        StopOnInterrupt() as stop,
    ):
        model = RemoteModel(ApiClient(parse_url(server.url)), None, print, sleep=interrupted)
        session = ChatSession(model, notify=notices.append)
        assert list(session.ask("hi", stop.steps)) == []
    assert notices == ["stopped before the answer began; the message was taken back"]
    assert session.turns == []


def test_a_message_that_never_fits_is_the_servers_error() -> None:
    with foreign(chat=as_error(400, "This model's maximum context length is 9 tokens")) as server:
        session, _ = session_with(server)
        with pytest.raises(
            NanoserveError, match="answered 400: This model's maximum context length is 9 tokens"
        ):
            answer(session, "hi")


def test_a_server_that_counts_is_asked_before() -> None:
    cards = as_json({"data": [{"id": "parrot", "max_model_len": 40}]})
    with foreign(chat=HELLO, models=cards) as server:
        server.script["/tokenize"] = lambda asked: as_json(
            {"count": 10 * len(asked.body["messages"])}
        )
        session, notices = session_with(server)
        for question in ("one", "two", "three"):
            answer(session, question)
        assert session.context_used() == 40
        assert session.model.context == 40
    assert notices == ["the context of 40 tokens is full: the oldest turn was dropped"]
    assert [len(body["messages"]) for body in server.bodies("/v1/chat/completions")] == [1, 3, 3]


def test_the_commands_of_the_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with foreign(chat=HELLO) as server:
        session, _ = session_with(server)
        client = ApiClient(parse_url(server.url))
        models = RemoteModels(client, None, print)
        conversation = Conversation(session, ChatOptions(plain=True), models)

        def said(line: str) -> str:
            conversation.obey(line)
            return capsys.readouterr().err.removesuffix("\n")

        assert said("/set temperature=0.5") == "temperature = 0.5"
        assert "top_p must be a number" in said("/set top_p=7")
        answer(session, "hi")
        shown = said("/show")
        (body,) = server.bodies("/v1/chat/completions")
        assert said("/set temperature=none") == "temperature = (the server's default)"
        said("/regen")
        assert len(server.bodies("/v1/chat/completions")) == 2
        assert said("/undo") == "took back: hi"
    assert "model    parrot" in shown and "context  1 turn\n" in shown
    assert "  temperature = 0.5\n" in shown and "  top_k = (the server's default)\n" in shown
    assert body["temperature"] == 0.5 and "top_k" not in body


def test_an_unusable_key_is_not_repeated() -> None:
    with pytest.raises(UsageError):
        ApiClient(parse_url("http://localhost"), "a b")


def test_neither_torch_nor_an_engine_is_needed() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from nanoserve.commands.main import run; "
        "run('chat')"
    )
    with foreign(chat=HELLO) as server:
        words = [sys.executable, "-c", program, "hi", "--url", server.url]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello there\n", "")


def test_models_of_a_server_are_listed_and_switched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cards = as_json({"data": [{"id": "parrot", "max_model_len": 4096}, {"id": "b"}]})
    (tmp_path / "notes").write_text("x")
    with foreign(chat=HELLO, models=cards) as server:
        server.script["/tokenize"] = lambda asked: as_json(
            {"count": 7 if "prompt" in asked.body else 9}
        )
        session, _ = session_with(server)
        models = RemoteModels(ApiClient(parse_url(server.url)), None, print)
        conversation = Conversation(session, ChatOptions(plain=True), models)
        answer(session, "hi")
        for line in ("/models", f"/file {tmp_path / 'notes'}", "/model parot", "/model b"):
            conversation.obey(line)
        said = capsys.readouterr().err.splitlines()
        answer(session, "again")
        (_, body) = server.bodies("/v1/chat/completions")
        (counted,) = [body for body in server.bodies("/tokenize") if "prompt" in body]
    assert said == [
        "* parrot  context of 4,096",
        "  b",
        f"{tmp_path / 'notes'}, 7 tokens, goes with the next message",
        "the server lists no model 'parot' (did you mean parrot?); /models lists them",
        "this is b; the conversation goes on",
    ]
    assert counted == {"model": "parrot", "prompt": "notes:\n\nx", "add_special_tokens": False}
    assert body["model"] == "b" and len(body["messages"]) == 3
