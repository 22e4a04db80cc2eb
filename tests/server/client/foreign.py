"""A server of someone else: it answers what a test has written down, byte for byte, and remembers
what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_SECONDS = 240.0
MODELS = {"object": "list", "data": [{"id": "parrot", "object": "model"}]}


@dataclass(frozen=True)
class Asked:
    """One request that came in."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Scripted:
    """An answer. With ``dies``, the connection ends behind the body though more was announced."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    dies: bool = False


Script = Scripted | Callable[[Asked], Scripted]


def as_json(content: Any, status: int = 200, **headers: str) -> Scripted:
    return Scripted(status, json.dumps(content).encode(), headers=headers)


def as_error(status: int, message: str, code: str | None = None, **headers: str) -> Scripted:
    return as_json(
        {"error": {"message": message, "type": "some_error", "code": code}}, status, **headers
    )


def as_stream(*events: Any, dies: bool = False, done: bool = True) -> Scripted:
    """Events as objects, or as the text behind ``data:``."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    lines = [f"data: {text}\n\n" for text in texts] + (
        ["data: [DONE]\n\n"] if done and not dies else []
    )
    return Scripted(body="".join(lines).encode(), kind="text/event-stream", dies=dies)


def said(text: str, reason: str | None = None, **delta: str) -> dict[str, Any]:
    """A chunk of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": text} | delta, "finish_reason": reason}]}


def used(prompt: int, completion: int) -> dict[str, Any]:
    """The chunk with the usage."""
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


HELLO = as_stream(said(""), said("Hello"), said(" there"), said("", "stop"), used(7, 2))
"""Two tokens."""


class Foreign:
    """The running server. ``script`` maps paths to answers, and may be changed."""

    def __init__(self, script: dict[str, Script]) -> None:
        self.script = {"/v1/models": as_json(MODELS), **script}
        self.asked: list[Asked] = []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def bodies(self, path: str) -> list[Any]:
        """Requests that were sent to a path."""
        return [asked.body for asked in self.asked if asked.path == path]


def _handler(server: Foreign) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            asked = Asked(
                self.path, {name.lower(): value for name, value in self.headers.items()}, body
            )
            server.asked.append(asked)
            script = server.script.get(self.path, Scripted(404))
            answer = script if isinstance(script, Scripted) else script(asked)
            self.send_response(answer.status)
            self.send_header("content-type", answer.kind)
            self.send_header("content-length", str(len(answer.body) + 1000 * answer.dies))
            for name, value in answer.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = True

        do_GET = do_POST = answer  # noqa: N815  (http.server's names)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    return Handler


@contextmanager
def foreign(**script: Script) -> Iterator[Foreign]:
    """A running server; keywords are paths below /v1, and ``chat`` is /v1/chat/completions."""
    names = {"chat": "chat/completions"}
    server = Foreign({f"/v1/{names.get(name, name)}": answer for name, answer in script.items()})
    thread = threading.Thread(target=server.http.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
