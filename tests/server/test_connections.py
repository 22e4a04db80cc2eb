"""More connections than descriptors: a server that may open very few files stands for a flood of
many."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from nanoserve.server.connections import RESERVED_DESCRIPTORS, SPARE_CONNECTIONS
from tests.server.starting import ROOT, Server, running_fake, wait_until
from tests.server.test_faults import CHAT, COMPLETION, LONG, SLOW_BODY, Reader, whole_text

OPEN_FILES = 64
FLOOD = 100


@pytest.fixture(scope="module")
def scarce() -> Iterator[Server]:
    """A server that may open 64 files. Two requests run at once, so that many take long."""
    with running_fake("--max-num-seqs", "2", OPEN_FILES=str(OPEN_FILES)) as server:
        yield server


@pytest.fixture(scope="module")
def whole(scarce: Server) -> str:
    return whole_text(scarce, LONG)


@contextmanager
def flooded(server: Server) -> Iterator[list[socket.socket]]:
    """Connections from someone without a key, most of which send nothing; the others begin a
    request."""
    with ExitStack() as closing:
        clients = [closing.enter_context(_connect(server)) for _ in range(FLOOD)]
        for client in clients[::4]:
            client.send(SLOW_BODY)
        # All have been taken in, and those that no longer fit have been closed.
        wait_until(lambda: len(_living(clients)) < OPEN_FILES - RESERVED_DESCRIPTORS)
        yield clients


def _connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port))


def _living(clients: list[socket.socket]) -> list[socket.socket]:
    """The connections that the server has not closed."""
    return [client for client in clients if _lives(client)]


def _lives(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_a_flood_of_connections_disturbs_nobody_and_is_one_line_in_the_log(
    scarce: Server, whole: str
) -> None:
    reader = Reader(scarce, LONG)
    reader.wait_begun()
    with flooded(scarce) as clients:
        assert scarce.get("/health").status_code == 200
        assert whole_text(scarce, LONG) == whole, "the newest connection is served"
        assert len(_living(clients)) > 0
        assert len(os.listdir(f"/proc/{scarce.process.pid}/fd")) < OPEN_FILES - SPARE_CONNECTIONS
    reader.join()
    assert reader.text == whole
    of_the_start = ("listening on", "loading", "ready")
    told = [line for line in scarce.lines if not any(word in line for word in of_the_start)]
    assert len(told) == 1 and re.match(
        r"\d+ connections are open, the most that can be", told[0]
    ), scarce.log[:2000]


def test_processes_that_die_during_a_flood_are_started_again(scarce: Server, whole: str) -> None:
    restarts = scarce.metric("nanoserve:engine_restarts_total")
    reader = Reader(scarce, LONG)
    reader.wait_begun()
    (template,) = [
        process for process in scarce.descendants() if b"template_process" in _command(process)
    ]
    with flooded(scarce):
        os.kill(scarce.engine_process_id(), signal.SIGKILL)
        os.kill(template, signal.SIGKILL)
        reader.join()
        chat = scarce.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
    assert reader.text == whole
    assert chat.status_code == 200, chat.text
    assert scarce.metric("nanoserve:engine_restarts_total") == restarts + 1
    assert "Traceback" not in scarce.log


def _command(process: int) -> bytes:
    return Path(f"/proc/{process}/cmdline").read_bytes()


def test_requests_leave_connections_for_who_asks_next(scarce: Server, whole: str) -> None:
    body = msgspec.json.encode(LONG | {"max_tokens": 480})
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with ExitStack() as closing:
        clients = [
            closing.enter_context(_connect(scarce))
            for _ in range(OPEN_FILES - RESERVED_DESCRIPTORS)
        ]
        for client in clients:
            client.sendall(request)
        wait_until(lambda: scarce.get("/v1/models").status_code == 503)
        refused = scarce.get("/v1/models")
        assert (
            refused.json()["error"]["code"] == "too_many_connections"
            and "retry-after" in refused.headers
        )
        for path in ("/health", "/ready", "/metrics"):
            assert scarce.get(path).status_code == 200, "how the server is can be asked in any case"
    wait_until(lambda: scarce.get("/v1/models").status_code == 200)
    assert whole_text(scarce, LONG) == whole


def test_too_few_descriptors_are_one_line() -> None:
    words = [sys.executable, "-m", "tests.server.fake_serve", "--port", "0"]
    variables = os.environ | {"OPEN_FILES": str(OPEN_FILES - 20)}
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240
    )
    (line,) = [line for line in done.stderr.splitlines() if "listening on" not in line]
    assert done.returncode == 1
    assert re.fullmatch(
        r"nanoserve: the server may open 44 files, and needs \d+: raise the limit \(ulimit -n\)",
        line,
    )
