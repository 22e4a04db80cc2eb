"""The front end's main: it runs HTTP and the engine side by side until the last answer."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn

from nanoserve.errors import RuntimeFailure
from nanoserve.server.app import make_app
from nanoserve.server.http_protocol import BoundedProtocol
from nanoserve.server.service import Service
from nanoserve.text.tokenizer import check_vocabulary

SEND_BUFFER_BYTES = 128 << 10
"""The system's buffer for a client that does not read; the rest of its answer waits in the front end."""
MAX_HEADER_BYTES = 64 << 10
_KEEP_ALIVE_SECONDS = 20
_LAST_WORDS_SECONDS = 2
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free port.

    Raises:
        RuntimeFailure: if the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RuntimeFailure(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise RuntimeFailure(f"cannot listen on {host} port {port}: {reason}; choose another --port") from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which `_Signals` does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run_server(
    service: Service,
    listener: socket.socket,
    drain_seconds: float,
    *,
    on_ready: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Serve until a signal says to stop and the running requests have ended.

    Args:
        service: what the endpoints work with.
        listener: the socket that clients connect to.
        drain_seconds: longest time for running requests to end.
        on_ready: called when the engine takes requests.
        say: called with lines for the user.

    Raises:
        NanoserveError: if the engine cannot start.
    """
    signals = _Signals()
    server = _Server(_http_config(service))
    http = asyncio.create_task(server.serve(sockets=[listener]))
    engine = asyncio.create_task(service.engine.run())
    started = asyncio.create_task(_announce(service, on_ready, say))
    first = asyncio.create_task(signals.first.wait())
    try:
        await _first_of(engine, started, first)
        await _first_of(engine, first)  # once it is ready, only a signal ends the wait
        await _drain(service, signals, drain_seconds, say)
    finally:
        # HTTP still runs here, so that the streams of a failed engine can end with an error.
        for task in (started, first, engine):
            task.cancel()
        await asyncio.gather(started, first, engine, return_exceptions=True)
        server.should_exit = True
        server.force_exit = signals.second.is_set()
        await http
        service.close()


async def _first_of(*tasks: "asyncio.Task[object]") -> None:
    """Wait until one task is done, and raise its error if it has one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _announce(service: Service, on_ready: Callable[[], None], say: Callable[[str], None]) -> None:
    facts = await service.engine.ready()
    check_vocabulary(service.tokenizer, facts.vocab_size)
    on_ready()
    say(f"ready: {service.model_name}, context {facts.max_model_len} tokens")


async def _drain(service: Service, signals: "_Signals", seconds: float, say: Callable[[str], None]) -> None:
    """Take no new requests, and wait for the running ones."""
    service.draining = True
    if not service.engine.running:
        return
    say(f"stopping: {service.engine.running} requests may end within {seconds:g} s; a second signal ends all")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while service.engine.running and not signals.second.is_set():
                await asyncio.sleep(0.02)


class _Signals:
    """Counts SIGTERM and SIGINT (Ctrl-C)."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _http_config(service: Service) -> uvicorn.Config:
    protocol = partial(BoundedProtocol, client_seconds=service.limits.client_seconds)
    return uvicorn.Config(
        make_app(service),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
