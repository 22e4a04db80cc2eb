"""Servers as processes of their own, and looking at them from outside."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 240.0
"""For things that take a second on a machine with nothing else to do."""
NO_TLS: dict[str, Any] = {"verify": False}
"""For every httpx request: it would read the system's certificates each time, which takes 40 ms."""


class Server:
    """A running front end with its engine."""

    def __init__(self, *arguments: str, module: str = "nanoserve", **environment: str) -> None:
        words = [sys.executable, "-m", module, *arguments]
        if module == "nanoserve":
            words.insert(3, "serve")
        # Its own place for temporary files, so that what is left of them can be seen. A socket's
        # path would not fit below it.
        self.directory = Path(tempfile.mkdtemp(prefix="ns" + 90 * "x"))
        variables = os.environ | {"TMPDIR": str(self.directory)} | environment
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.key: str | None = None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def url(self) -> str:
        wait_until(
            lambda: (
                any("listening on" in line for line in self.lines)
                or self.process.poll() is not None
            )
        )
        line = next((line for line in self.lines if "listening on" in line), None)
        assert line is not None, self.lines
        return line.split()[-1]

    @property
    def log(self) -> str:
        """Return its output on stderr."""
        return "\n".join(self.lines)

    def wait_ready(self) -> None:
        url = self.url
        wait_until(lambda: self.process.poll() is not None or answers(f"{url}/ready", self.headers))
        assert self.process.poll() is None, self.log

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=PATIENCE_SECONDS, **NO_TLS)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """With a JSON body, or with whatever ``settings`` say."""
        if body is not None:
            settings["json"] = body
        settings.setdefault("headers", self.headers)
        return httpx.post(self.url + path, timeout=PATIENCE_SECONDS, **NO_TLS, **settings)

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        lines = self.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0] == name]
        assert values, name
        return sum(values)

    def wait_idle(self) -> None:
        """Until nothing runs and every block is back."""
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        ):
            wait_until(lambda name=name: self.metric(name) == 0)  # type: ignore[misc]

    def engine_process_id(self) -> int:
        """Process id of the engine: the child that leads a process group."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        leaders = [int(child) for child in children if os.getpgid(int(child)) == int(child)]
        assert len(leaders) == 1, children
        return leaders[0]

    def descendants(self) -> list[int]:
        """All processes below the front end."""
        found: list[int] = []
        pending = [self.process.pid]
        while pending:
            for task in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
                children = [int(child) for child in task.read_text().split()]
                found += children
                pending += children
        return found

    def sockets(self) -> list[str]:
        """Names of those at which front end and engine listen, which are in no file system."""
        inodes = set()
        for process in (self.process.pid, *self.descendants()):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inodes.add(os.readlink(descriptor))
        lines = [
            line.split()
            for line in Path("/proc/net/unix").read_text().splitlines()
            if "@nanoserve-" in line
        ]
        return [
            line[7] for line in lines if line[3] == "00010000" and f"socket:[{line[6]}]" in inodes
        ]

    def left_behind(self) -> list[str]:
        """Files in its directory for temporary ones, but for the cache that torch makes there when
        it is imported."""
        return [str(path) for path in self.directory.rglob("*") if "torchinductor" not in str(path)]

    def end(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
            self._reader.join(PATIENCE_SECONDS)


def wait_until(condition: Any, seconds: float = PATIENCE_SECONDS) -> None:
    """Poll until it holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def shared_memory(process_id: int) -> list[str]:
    """Memory that a process has mapped of the kind that outlives it."""
    maps = Path(f"/proc/{process_id}/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/" in line or "/SYSV" in line]


def process_state(process_id: int) -> str:
    """The system's letter for it: R runs, S sleeps, T is stopped, Z is a zombie; empty if there is
    none."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(process_id: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    return process_state(process_id) not in ("", "Z")


def answers(url: str, headers: dict[str, str]) -> bool:
    """Whether a URL is answered with 200."""
    try:
        return httpx.get(url, headers=headers, timeout=10, **NO_TLS).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def running(*arguments: str, **settings: str) -> Iterator[Server]:
    """A server that is ready; ended, and seen to leave nothing behind."""
    server = Server("--port", "0", *arguments, **settings)
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()
    assert not server.left_behind(), server.left_behind()
    shutil.rmtree(server.directory)


@contextmanager
def running_fake(*arguments: str, **settings: str) -> Iterator[Server]:
    """A server with the fake engine, which starts in a moment."""
    with running(*arguments, module="tests.server.fake_serve", **settings) as server:
        yield server
