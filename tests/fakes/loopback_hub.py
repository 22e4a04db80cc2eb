"""A small Hugging Face hub on loopback: what huggingface_hub asks for models, of files in memory."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

LARGE = 1000
"""Files of this size and more are kept by their SHA-256 and served from another address."""
_API = re.compile(r"/api/models/([^/]+/[^/?]+)(?:/revision/[^/?]+)?(?:\?.*)?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-")


@dataclass
class Repository:
    files: dict[str, bytes]
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})
    gated: bool = False
    """Whether files are served only with the token `accepted`."""
    stated: dict[str, str] = field(default_factory=dict)
    """What is stated as `commit` or as the SHA-256 of a file instead of the right value."""

    @property
    def commit(self) -> str:
        if "commit" in self.stated:
            return self.stated["commit"]
        digest = hashlib.sha1()
        for name, content in self.files.items():
            digest.update(name.encode() + content)
        return digest.hexdigest()


@dataclass
class LoopbackHub:
    """What the hub serves, and what it was asked for."""

    endpoint: str
    store: str
    """The address of another server, to which downloads of large files are redirected."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    ranges: list[int] = field(default_factory=list)
    """First byte of each download of a large file."""
    tokens_at_store: list[str] = field(default_factory=list)
    """Tokens that were shown to the other server, which has no business with them."""
    sent: int = 0
    """Bytes of large files that were sent."""
    stall_after: int | None = None
    """A download of a large file stops here until `goes_on` is set."""
    has_stalled: Event = field(default_factory=Event)
    goes_on: Event = field(default_factory=Event)

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Let this process ask this hub, as a user in `home` without a cache, aliases or a
        token."""
        monkeypatch.chdir(home)
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        for name, value in {
            "ENDPOINT": self.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)

    def environment(self, home: Path) -> dict[str, str]:
        """The variables of a process that asks this hub, as such a user."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        return kept | {
            "HOME": str(home),
            "HF_HOME": str(home),
            "HF_ENDPOINT": self.endpoint,
            "TMPDIR": str(home),
        }


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Stay silent."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        api, resolve = _API.fullmatch(self.path), _RESOLVE.fullmatch(self.path)
        if self.path.startswith("/large/"):
            self._serve_large(self.path.removeprefix("/large/"))
        elif api and api[1] in self.hub.repositories:
            self._describe(api[1])
        elif resolve and resolve[1] in self.hub.repositories:
            self._resolve(self.hub.repositories[resolve[1]], resolve[2])
        else:
            # as the hub answers those without a token
            self._send(401, {"X-Error-Code": "RepoNotFound"}, b'{"error":"Repository not found"}')

    def _describe(self, name: str) -> None:
        repository = self.hub.repositories[name]
        siblings = []
        for file, content in repository.files.items():
            sibling: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": "0" * 40}
            if len(content) >= LARGE:
                sha256 = repository.stated.get(file, hashlib.sha256(content).hexdigest())
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        told = {
            "id": name,
            "sha": repository.commit,
            "siblings": siblings,
            "cardData": repository.card,
            "gated": "auto" if repository.gated else False,
            "private": False,
            "tags": [],
            "downloads": 0,
        }
        self._send(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def _resolve(self, repository: Repository, file: str) -> None:
        accepted = self.headers.get("Authorization") == "Bearer accepted"
        headers = {"X-Repo-Commit": repository.commit}
        if repository.gated and not accepted:
            self._send(401, headers | {"X-Error-Code": "GatedRepo"}, b"")
        elif file not in repository.files:
            self._send(404, headers | {"X-Error-Code": "EntryNotFound"}, b"")
        elif len(repository.files[file]) < LARGE:
            content = repository.files[file]
            self._send(200, headers | {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}, content)
        else:
            content = repository.files[file]
            sha256 = hashlib.sha256(content).hexdigest()
            headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
            self._send(302, headers | {"Location": f"{self.hub.store}/large/{sha256}"}, b"")

    def _serve_large(self, sha256: str) -> None:
        (content,) = {
            content
            for repository in self.hub.repositories.values()
            for content in repository.files.values()
            if hashlib.sha256(content).hexdigest() == sha256
        }
        headers, status, first = {"Accept-Ranges": "bytes"}, 200, 0
        asked = _RANGE.match(self.headers.get("Range", ""))
        if asked:
            status, first = 206, int(asked[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if self.command == "HEAD":
            return self._send(status, headers, content[first:])
        self.hub.ranges.append(first)
        if "Authorization" in self.headers:
            self.hub.tokens_at_store.append(self.headers["Authorization"])
        self._send_head(status, headers, len(content) - first)
        end = len(content)
        if self.hub.stall_after is not None and first < self.hub.stall_after:
            end = self.hub.stall_after
        self._write(content[first:end])
        if end < len(content):
            self.hub.has_stalled.set()
            self.hub.goes_on.wait(60)
            self._write(content[end:])

    def _write(self, content: bytes) -> None:
        try:
            self.wfile.write(content)
            self.wfile.flush()
        except OSError:  # the client is gone
            self.close_connection = True
            return
        self.hub.sent += len(content)

    def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self._send_head(status, headers, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """A hub without repositories, until the block ends."""

    class Handler(_Handler):
        pass

    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    addresses = [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    hub = Handler.hub = LoopbackHub(*addresses)
    threads = []
    for server in servers:
        server.daemon_threads = True
        threads.append(Thread(target=server.serve_forever, args=(0.02,), daemon=True))
        threads[-1].start()
    try:
        yield hub
    finally:
        hub.goes_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()
