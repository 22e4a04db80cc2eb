"""``nanoserve chat --url`` and our own server."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from nanoserve.commands.chat_session import ChatSession
from nanoserve.commands.main import main
from nanoserve.commands.remote_model import RemoteModel
from nanoserve.server.client.address import parse_url
from nanoserve.server.client.connection import ApiClient
from tests.server.starting import Server, wait_until

QUESTION = "Tell me a story about a fox and a boat."


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    """A server with the fake engine, whose key comes from a variable."""
    server = Server("--port", "0", module="tests.server.fake_serve", NANOSERVE_API_KEY="secret")
    server.key = "secret"
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()
        shutil.rmtree(server.directory)


def session_with(server: Server, **settings: Any) -> ChatSession:
    model = RemoteModel(ApiClient(parse_url(server.url), server.key), None, notify=print)
    return ChatSession(model, notify=print, **settings)


def test_the_answer_is_the_one_that_others_get(
    server: Server,
    client: openai.OpenAI,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    code = main(
        [
            "chat",
            QUESTION,
            "--url",
            server.url,
            "--temperature",
            "0",
            "--max-tokens",
            "12",
            "--json",
        ]
    )
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    found = json.loads(captured.out)
    messages: Any = [{"role": "user", "content": QUESTION}]
    other = client.chat.completions.create(
        model=found["model"], messages=messages, temperature=0, max_tokens=12
    )
    assert found["text"] == other.choices[0].message.content
    assert found["finish_reason"] == "length"
    assert other.usage is not None
    assert found["usage"]["prompt_tokens"] == other.usage.prompt_tokens
    assert found["usage"]["completion_tokens"] == 12
    assert found["usage"]["cached_tokens"] is not None


def test_a_conversation_is_counted_and_regenerated(server: Server) -> None:
    session = session_with(server, settings={"temperature": 0, "max_tokens": 6})
    first = "".join(text for _, text in session.ask(QUESTION))
    # pieces come together on a busy machine
    assert "".join(text for _, text in session.regenerate()) == first
    assert session.last_answer is not None
    prompt, answer = (
        session.last_answer.usage.prompt_tokens,
        session.last_answer.usage.completion_tokens,
    )
    assert answer == 6
    assert prompt is not None and session.context_used() is not None
    assert session.model.context is not None and session.model.context > prompt + answer
    assert session.model.count_tokens([{"role": "user", "content": QUESTION}]) == prompt


def test_an_answer_that_is_stopped_is_aborted_on_the_server(keyed: Server) -> None:
    def after_three(stream: Iterator[Any]) -> Iterator[Any]:
        for _ in range(3):
            yield next(stream)
        assert keyed.metric("vllm:num_requests_running") == 1

    session = session_with(keyed)
    text = "".join(text for _, text in session.ask("hi", after_three))
    assert text and session.turns[-1].interrupted
    wait_until(lambda: keyed.metric("vllm:num_requests_running") == 0)
    assert session.context_used()


def test_a_server_with_a_key(
    keyed: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words = ["chat", "hi", "--url", keyed.url, "--max-tokens", "2", "--plain"]
    assert main(words) == 1
    assert "answered 401: the API key is missing or wrong" in capsys.readouterr().err
    assert main([*words, "--api-key", "secret"]) == 0
