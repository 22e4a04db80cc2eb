"""The front end's main: it runs HTTP and the engine side by side until the last answer."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from nanoserve.errors import RuntimeFailure
from nanoserve.server.app import make_app
from nanoserve.server.connections import BoundedProtocol, Connections, most_connections
from nanoserve.server.service import Service
from nanoserve.utils.memory import keep_what_is_loaded

SEND_BUFFER_BYTES = 128 << 10
"""The system's buffer for a client that does not read; the rest of its answer waits in the front
end."""
MAX_HEADER_BYTES = 64 << 10
_BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free port. Raises RuntimeFailure if the address cannot
    be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise RuntimeFailure(f"cannot listen on {host}: {error.strerror or error}") from None
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # "::" takes IPv4 too
    try:
        listener = socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        reason = str(error)
        if error.errno:
            reason = os.strerror(error.errno)
        raise RuntimeFailure(
            f"cannot listen on {host} port {port}: {reason}; choose another --port"
        ) from None
    # connections inherit it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return listener


async def run_server(
    service: Service,
    listener: socket.socket,
    drain_seconds: float,
    *,
    on_ready: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT (Ctrl-C) and the end of the running requests; a second signal
    does not wait.

    ``on_ready`` is called when the engine takes requests, ``say`` with lines for the user. Raises
    NanoserveError if the engine cannot start.
    """
    server, connections = _take_connections(service, listener)
    stop = asyncio.Event()
    stop_now = asyncio.Event()

    def count_signal() -> None:
        if stop.is_set():
            stop_now.set()
            server.force_exit = True
        stop.set()

    _on_signals(count_signal)
    http = asyncio.create_task(server.serve(sockets=[]))  # it has no listener: `connections` has
    engine = asyncio.create_task(service.engine.run())
    started = asyncio.create_task(_announce(service, on_ready, say))
    stopping = asyncio.create_task(stop.wait())
    try:
        await _first_of(engine, started, stopping)
        await _first_of(engine, stopping)  # once it is ready, only a signal ends the wait
        service.draining = True
        running = service.engine.running
        if running:
            say(
                f"stopping: {running} requests may end within {drain_seconds:g} s; a second signal "
                "ends all"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    while service.engine.running and not stop_now.is_set():
                        await asyncio.sleep(0.02)
    finally:
        connections.close()
        # HTTP still runs here, so that the streams of a failed engine can end with an error.
        for task in (started, stopping, engine):
            task.cancel()
        await asyncio.gather(started, stopping, engine, return_exceptions=True)
        service.end_processes()  # requests that wait for them end with an error
        server.should_exit = True
        await http
        service.close()


def _on_signals(act: Callable[[], None]) -> None:
    """Have SIGTERM and SIGINT call `act` in the running loop, and do nothing once that is closed.

    The loop's own handlers would be gone with it, and a signal then would end the process before
    its exit code.
    """
    loop = asyncio.get_running_loop()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(act)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)


async def _first_of(*tasks: "asyncio.Task[object]") -> None:
    """Wait until one task is done, and raise its error if it has one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _announce(
    service: Service, on_ready: Callable[[], None], say: Callable[[str], None]
) -> None:
    await service.engine.became_ready.wait()
    facts = service.facts()
    keep_what_is_loaded()
    on_ready()
    say(f"ready: {service.model_name}, context {facts.max_model_len} tokens")


def _take_connections(
    service: Service, listener: socket.socket
) -> tuple[uvicorn.Server, Connections]:
    """Begin to take connections; the server answers them once it runs. Raises RuntimeFailure if
    there are too few descriptors."""
    connections = Connections(listener, most_connections())
    config = uvicorn.Config(
        make_app(service, connections),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    new_connection = partial(
        BoundedProtocol,
        config=config,
        server_state=server.server_state,
        app_state={},
        connections=connections,
        client_seconds=service.limits.client_seconds,
    )
    connections.accept(new_connection)
    return server, connections
