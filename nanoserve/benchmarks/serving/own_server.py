"""``nanoserve serve`` as a process that a benchmark starts, and that ends with it whatever happens."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from nanoserve.client.address import ServerAddress, parse_url
from nanoserve.client.connection import ApiClient, ServerLost, ServerRefused, served_model
from nanoserve.errors import RuntimeFailure
from nanoserve.processes.children import follow_parent, run_module

_CHILD = (sys.executable, "-m", "nanoserve.benchmarks.serving.own_server")
_COMMAND = "nanoserve"
_LISTENING = "listening on "
_PREFIX = "nanoserve: "
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
_FOR_OTHERS = ("NANOSERVE_API_KEY", "NANOSERVE_SERVED_MODEL_NAME")
"""Meant for servers that others reach; this one lives for one benchmark."""


def prepare_engine(model: str | None, settings: dict[str, Any], threads: int | None) -> dict[str, Any]:
    """Build what a server of our own will run on, in another process: a server builds it while it answers.

    Returns:
        Facts about the engine as it will run with these settings of LLM: model, dtype, operators, layers, threads.

    Raises:
        RuntimeFailure: in the process's own words, if the model cannot be opened.
    """
    words = json.dumps(model), msgspec.json.encode(settings).decode()  # a layout is a dataclass
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return run_module("nanoserve.benchmarks.settling", *words, environment=environment)


class OwnServer:
    """A server on a free port of this machine; a context manager that gives it back.

    Args:
        flags: of ``nanoserve serve``, beside host and port.

    Attributes:
        process_id: of its front end.

    Raises:
        RuntimeFailure: in its own words, if it does not come up.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        words = [*_CHILD, str(os.getpid()), _COMMAND, "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        environment = {name: value for name, value in os.environ.items() if name not in _FOR_OTHERS}
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the benchmark, which then ends its server
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.address = self._wait_until_ready()  # where it listens
            # the name under which it serves its model.
            self.model = served_model(ApiClient(self.address), None, self._lines.append).id
        except BaseException:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip())

    def _wait_until_ready(self) -> ServerAddress:
        address = None
        while self._process.poll() is None:
            if address is None:
                address = next((parse_url(line.split()[-1]) for line in self._lines if _LISTENING in line), None)
            elif _is_ready(ApiClient(address)):
                return address
            time.sleep(_POLL_SECONDS)
        self._reader.join(_PATIENCE_SECONDS)
        last = self._lines[-1] if self._lines else f"exit code {self._process.returncode}"
        raise RuntimeFailure(f"the server did not start: {last.removeprefix(_PREFIX)}")

    def close(self) -> None:
        """End the server, whatever it is doing: its answers are not needed any more."""
        for _ in range(2):  # the second one says not to wait for running requests
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its engine notices, and ends too
            self._process.wait()
        self._reader.join(_PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_ready(client: ApiClient) -> bool:
    try:
        client.ask(f"{client.address.root}/ready")
    except (ServerRefused, ServerLost):
        return False
    return True


if __name__ == "__main__":  # the child: the command with the words that follow, for as long as its parent lives
    follow_parent(int(sys.argv.pop(1)))
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
