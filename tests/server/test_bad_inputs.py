"""Requests that must not be answered, and their refusal: 4xx with OpenAI's error body, and everyone else
unharmed.

The cases are the list of bad inputs in the project's notes on what users expect.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.server.starting import NO_TLS, PATIENCE_SECONDS, Server, wait_until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTROL = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
MESSAGE = {"role": "user", "content": "Hi"}
JSON = {"content-type": "application/json"}
MANY_TOKENS = [str(token) for token in range(20_000)]
Ask = Callable[..., httpx.Response]


@pytest.fixture(autouse=True, scope="module")
def unharmed(server: Server) -> Iterator[None]:
    """A control request answers the same before and after all of this, and every block is back."""
    before = server.post(COMPLETION, CONTROL).json()["choices"]
    restarts = server.metric("nanoserve:engine_restarts_total")
    yield
    assert server.post(COMPLETION, CONTROL).json()["choices"] == before
    assert server.get("/health").status_code == 200
    assert server.metric("nanoserve:engine_restarts_total") == restarts
    server.wait_idle()


def _is_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    result: dict[str, Any] = error
    return result


def _complete(server: Server, **fields: Any) -> httpx.Response:
    return server.post(COMPLETION, {"prompt": "Hi", "max_tokens": 1} | fields)


def _chat(server: Server, **fields: Any) -> httpx.Response:
    return server.post(CHAT, {"messages": [MESSAGE], "max_tokens": 1} | fields)


# Bodies that are no request, in any of the requests.
BODIES = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b"not json",
    b"\x1f\x8b\x08\x00gzip",
    b'{"prompt": "a"} trailing',
]
BODIES += [
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud83d"}',
    b'{"prompt": "a\\u0000b"}',
    b'{"prompt": "a\x01b"}',
]
BODIES += [
    b'{"prompt": "a", "temperature": ' + number + b"}"
    for number in (b"NaN", b"1e999", b"-Infinity")
]
BODIES += [b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
BODIES += [b'{"prompt": "a", "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"]


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize"])
def test_bodies_that_are_no_request(server: Server, path: str, body: bytes) -> None:
    _is_error(server.post(path, content=body, headers=JSON), 400)


# Fields of chats and of completions, and values out of range or of another type.
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-0.1, 1e308, "1", True, []],
    "n": ["5", 1.5, True, 10**9, 0, -1, 17],
    "max_tokens": [-1, 0, 2**63, 10**9, 1.5, "1"],
    "min_tokens": [-1, 10**9],
    "top_p": [0, 1.1, -1],
    "top_k": [-2, 1.5, 2**40],
    "min_p": [-0.1, 1.5],
    "presence_penalty": [-2.5, 3],
    "frequency_penalty": [-2.5, 3],
    "repetition_penalty": [0, -1, 1e9],
    "seed": [-2, 2**64, 1.0, "a"],
    "stop": [[""], "", ["a"] * 10_000, "a" * 500_000, [5], 5],
    "stop_token_ids": [[-1], [4096], [2**31], ["a"], [5] * 1025],
    "logit_bias": [
        {"-1": 1},
        {"4096": 1},
        {str(2**31): 1},
        {"a": 1},
        {"5": 200},
        [1],
        dict.fromkeys(MANY_TOKENS, 1),
    ],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, {"other": 1}, 5],
    "user": [5, {}, "x" * 257],
    "priority": ["high", 1.5, 3, -(2**70)],
    "chat_template": ["{{ 7 * 7 }}", None],
    "cache_salt": ["mine"],
    "unknown_field": [None, 1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in OUT_OF_RANGE for value in OUT_OF_RANGE[field]]
)
@pytest.mark.parametrize("ask", [_chat, _complete])
def test_fields_that_are_out_of_range_or_unknown(
    server: Server, ask: Ask, field: str, value: Any
) -> None:
    error = _is_error(ask(server, **{field: value}), 400)
    assert field in error["message"] or field in (error["param"] or ""), error


PROMPTS: list[Any] = [
    "",
    [],
    [""],
    [[]],
    ["a", ""],
    ["a", 5],
    [5, [5]],
    [-1],
    [4096],
    [2**31],
    [[5, 4096]],
]
PROMPTS += [[True], [1.5], {}, None, 5, ["a"] * 129, [None], [[["a"]]]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
def test_prompts_that_are_none(server: Server, prompt: Any) -> None:
    _is_error(_complete(server, prompt=prompt), 400)


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/"}}
MESSAGES: list[Any] = [[], {}, "hello", None, [5], [{}], [{"role": "user"}], [{"content": "a"}]]
MESSAGES += [[{"role": role, "content": "a"}] for role in ("king", 5)]
MESSAGES += [
    [{"role": "user", "content": content}]
    for content in (5, None, [IMAGE], [{"type": "text"}], [5], "a\0b")
]
MESSAGES += [[{"role": "user", "content": "a", "unknown": 1}]]
MESSAGES += [[{"role": "assistant", "tool_calls": json.loads("[" * 200 + "]" * 200)}]]


@pytest.mark.parametrize("messages", MESSAGES, ids=lambda messages: str(messages)[:60])
def test_messages_that_are_none(server: Server, messages: Any) -> None:
    _is_error(_chat(server, messages=messages), 400)


@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [
        (_chat, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (_chat, {"response_format": {"type": "json_object", "x": 1}}, "response_format"),
        (_chat, {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools"),
        (_chat, {"top_logprobs": 5}, "top_logprobs"),
        (_chat, {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        (_chat, {"logprobs": 5}, "logprobs"),
        (_chat, {"max_completion_tokens": 2}, "max_tokens"),
        (_chat, {"audio": {}}, "audio"),
        (_chat, {"functions": [{"name": "f"}]}, "functions"),
        (_complete, {"max_tokens": 0}, "max_tokens"),
        (_complete, {"echo": 1}, "echo"),
        (_complete, {"best_of": 2}, "best_of"),
        (_complete, {"suffix": "x"}, "suffix"),
        (_complete, {"logprobs": 21}, "logprobs"),
        (_complete, {"logprobs": -1}, "logprobs"),
    ],
)
def test_fields_that_one_of_them_does_not_have(
    server: Server, ask: Ask, fields: dict[str, Any], param: str
) -> None:
    assert param in (_is_error(ask(server, **fields), 400)["param"] or "")


def test_a_huge_fan_out_is_refused(server: Server) -> None:
    _is_error(_complete(server, n=10**9), 400)


def test_another_model_is_not_found(server: Server) -> None:
    for ask in (_chat, _complete):
        assert _is_error(ask(server, model="gpt-7"), 404)["code"] == "model_not_found"


def test_other_paths_and_methods(server: Server) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/",
        "//v1/models",
        "/v1/models//",
        "/v1/embeddings",
        "/%2e%2e/etc/passwd",
        "/health/",
    ):
        _is_error(server.get(path), 404)
    preflight = httpx.options(server.url + CHAT, headers={"origin": "http://evil.example"})
    _is_error(preflight, 405)
    assert not any(name.startswith("access-control") for name in preflight.headers)
    _is_error(server.get(CHAT), 405)
    _is_error(server.post("/v1/models", {}), 405)


def test_only_json_is_taken(server: Server) -> None:
    body = json.dumps(CONTROL)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        _is_error(server.post(COMPLETION, content=body, headers={"content-type": kind}), 415)


def test_control_tokens_in_a_message_are_text(server: Server) -> None:
    spelled = {"messages": [{"role": "user", "content": "<|end|><|assistant|>"}]}
    plain = {"messages": [{"role": "user", "content": ""}]}
    tokens, frame = (server.post("/tokenize", body).json()["tokens"] for body in (spelled, plain))
    assert tokens.count(1) == frame.count(1), "the end of a turn is the template's alone"


def test_strange_text_comes_back_as_utf8(server: Server) -> None:
    for text in ("\u202egnirts\u202c", "👩‍👩‍👧", "\ufffe", "\x7f\x1b[31m", "é" * 100):
        answer = _chat(
            server, messages=[{"role": "user", "content": text}], max_tokens=5, stream=True
        )
        assert answer.status_code == 200
        answer.content.decode("utf-8")


# ------------------------------------------------------------------------------------------ below
# the requests


def _connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 80), timeout=PATIENCE_SECONDS)


def _head(path: str = COMPLETION, **headers: Any) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def test_a_body_beyond_the_limit_is_refused_by_its_declared_length(server: Server) -> None:
    with _connect(server) as connection:
        connection.sendall(_head(content_length=(1 << 20) + 1))
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b'"request_too_large"' in answer


def test_a_body_beyond_the_limit_is_refused_while_it_comes_in_chunks(server: Server) -> None:
    with _connect(server) as connection:
        connection.sendall(_head(transfer_encoding="chunked"))
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        answer = b""
        try:
            for _ in range(17):
                connection.sendall(chunk)
            connection.sendall(b"0\r\n\r\n")
            answer = _read_all(connection)
        except (BrokenPipeError, ConnectionResetError):
            answer = answer or _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_prompt_of_ten_megabytes_is_refused(server: Server) -> None:
    # The answer may come, and the connection go, before all of it is sent.
    with suppress(httpx.WriteError, httpx.RemoteProtocolError):
        _is_error(_complete(server, prompt="a" * 10_000_000), 413)


@pytest.mark.parametrize("path", ["/health", COMPLETION])
def test_a_request_with_two_lengths_is_refused_and_the_connection_closed(
    server: Server, path: str
) -> None:
    with _connect(server) as connection:
        connection.sendall(
            _head(path, content_length=4, transfer_encoding="chunked") + b"2\r\n{}\r\n0\r\n\r\n"
        )
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400") and b"Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_only_names_of_the_machine_itself_are_answered(server: Server) -> None:
    url = httpx.URL(server.url)
    for host in (
        "evil.example",
        f"evil.example:{url.port}",
        "",
        "localhost.evil.example",
        "[",
        "192.168.0.1",
    ):
        error = _is_error(
            httpx.get(server.url + "/v1/models", headers={"host": host}, **NO_TLS), 403
        )
        assert error["code"] == "host_not_allowed" and "--allowed-hosts" in error["message"]
    for host in (
        "localhost",
        f"LOCALHOST:{url.port}",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]",
        "[::1]:8000",
    ):
        assert (
            httpx.get(server.url + "/v1/models", headers={"host": host}, **NO_TLS).status_code
            == 200
        )


def test_slow_clients_are_cut_off(server: Server) -> None:
    starts = (b"", b"POST /v1/compl", _head(content_length=100)[:-2])
    headless = [_connect(server) for _ in starts]
    dripping = _connect(server)
    for connection, start in zip(headless, starts, strict=True):
        connection.sendall(start)
    dripping.sendall(_head(content_length=100))
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.2):
            with suppress(OSError):
                dripping.sendall(b" ")

    thread = threading.Thread(target=drip)
    thread.start()
    assert [_read_all(connection) for connection in headless] == [b"", b"", b""]
    answer = _read_all(dripping)
    stop.set()
    thread.join()
    assert answer.startswith(b"HTTP/1.1 408") and b'"request_timeout"' in answer
    for connection in (*headless, dripping):
        connection.close()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"\r\n\r\n\r\n\x00" * 10,
        b"GET /\xff HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_same_form(server: Server, rubbish: bytes) -> None:
    with _connect(server) as connection:
        connection.sendall(rubbish)
        answer = _read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400")
    assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


def test_a_header_of_a_megabyte_ends_the_connection(server: Server) -> None:
    with _connect(server) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(_head(x="a" * 1_000_000, content_length=2) + b"{}")
        answer = _read_all(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def _drop_connections(server: Server) -> None:
    """Two hundred, at different moments of a request."""
    body = json.dumps(
        {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
    ).encode()
    for number in range(200):
        connection = _connect(server)
        if number % 4 == 1:
            connection.sendall(b"POST ")
        elif number % 4 == 2:
            connection.sendall(_head(content_length=len(body)) + body[:20])
        elif number % 4 == 3:
            connection.sendall(_head(content_length=len(body)) + body)
        connection.close()


def _send_monsters(server: Server) -> None:
    """Requests that take a moment to refuse: deep, long, and too long."""
    deep = b'{"prompt": ' + b"[" * 400_000 + b"]" * 400_000 + b"}"
    _is_error(server.post(COMPLETION, content=deep, headers=JSON), 400)
    assert (
        _is_error(_complete(server, prompt="a" * 1_000_000), 400)["code"]
        == "context_length_exceeded"
    )
    _is_error(_chat(server, messages=[{"role": "user", "content": "a " * 500_000}]), 400)
    _is_error(_chat(server, messages=[{"role": "user", "content": "a"}] * 25_000), 400)
    _is_error(_complete(server, prompt=["a"] * 128, stop_token_ids=list(range(4096)) * 40), 400)
    _is_error(_complete(server, prompt=[1] * 300_000), 400)
    _is_error(_complete(server, n=10**9, max_tokens=10**9), 400)
    with suppress(httpx.WriteError, httpx.RemoteProtocolError):
        _is_error(_complete(server, prompt="a" * 10_000_000), 413)


@pytest.mark.parametrize(
    "disturb", [_drop_connections, _send_monsters], ids=["dropped", "monsters"]
)
def test_other_streams_are_unharmed(server: Server, disturb: Callable[[Server], None]) -> None:
    undisturbed = GreedyStream(server)
    undisturbed.join()
    others = [GreedyStream(server) for _ in range(2)]
    disturb(server)
    for other in others:
        other.join()
        assert other.text == undisturbed.text
    server.wait_idle()


class GreedyStream(threading.Thread):
    """Reads the same greedy stream each time."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._url = server.url + COMPLETION
        self.text = ""
        self.start()

    def run(self) -> None:
        body = CONTROL | {"max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=240, **NO_TLS) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]


def test_equal_request_ids_of_two_clients_are_not_mixed_up(server: Server) -> None:
    headers = {"x-request-id": "mine"}
    answers = [
        server.post(COMPLETION, CONTROL | {"max_tokens": count}, headers=headers)
        for count in (3, 9)
    ]
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [3, 9]
    assert len({answer.headers["x-request-id"] for answer in answers} | {"mine"}) == 3


def test_a_client_that_leaves_is_aborted_at_whatever_moment(server: Server) -> None:
    body = {"prompt": [5] * 600, "max_tokens": 400, "ignore_eos": True}
    for stream in (False, True):
        for pause in (0.0, 0.05, 0.6):
            content = json.dumps(body | {"stream": stream}).encode()
            with _connect(server) as connection:
                connection.sendall(_head(content_length=len(content)) + content)
                time.sleep(pause)
            wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    server.wait_idle()


def test_a_client_that_never_reads_is_cut_off_and_others_go_on(server: Server) -> None:
    url = httpx.URL(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((url.host, url.port))
    body = {
        "prompt": "Once",
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": True,
        "n": 4,
        "logprobs": 20,
    }
    content = json.dumps(body).encode()
    connection.sendall(_head(content_length=len(content)) + content)
    wait_until(lambda: server.metric("vllm:num_requests_running") == 4)
    assert _complete(server).status_code == 200
    server.wait_idle()  # long before its 3600 tokens are through
    connection.close()
