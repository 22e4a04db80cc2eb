"""Connections of clients: each keeps HTTP's rules within a time, and all together leave descriptors
for the server.

Anyone who reaches the address can open connections, without a key. So there are never more than the
descriptors that are left for them. At that number, the connection that has waited longest for its
client makes room for a new one, which stays in the system's queue until then. A connection whose
request is being answered is never closed for another.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoserve.errors import RuntimeFailure
from nanoserve.server.http_bodies import ApiError
from nanoserve.utils.descriptors import allow_descriptors, open_descriptors

MOST_CONNECTIONS = 4096
"""More than the requests that may run and wait by default, each of which has one."""
RESERVED_DESCRIPTORS = 32
"""Descriptors for the server itself: 16 while the engine and the processes of templates and
grammars run, eight more while one of these processes is restarted, and some for files and for a
connection that is closed to make room."""
SPARE_CONNECTIONS = 8
"""Connections that no request may fill: the next client gets an answer in any case."""
FEWEST_CONNECTIONS = 2 * SPARE_CONNECTIONS

_ACCEPTED_AT_ONCE = 8
"""New connections in one turn of the event loop, so that many of them do not delay the others."""
# time for a client to send something before its connection makes room for another
_PATIENCE_SECONDS = 0.25
_FULL_SECONDS = 0.05  # until a new connection is tried again when none can make room
_RETRY_SECONDS = 1.0  # until one is tried again when the system has no descriptor for it
_NOTICE_SECONDS = 60.0  # time between two lines about too many connections

_LOG = logging.getLogger("nanoserve.server")


def most_connections() -> int:
    """The number of connections that this process may have beside its own descriptors. Raises its
    limit of open files for them.

    Raises RuntimeFailure if too few are left.
    """
    own = open_descriptors() + RESERVED_DESCRIPTORS
    allowed = allow_descriptors(own + MOST_CONNECTIONS)
    if allowed - own < FEWEST_CONNECTIONS:
        least = own + FEWEST_CONNECTIONS
        raise RuntimeFailure(
            f"the server may open {allowed} files, and needs {least}: raise the limit (ulimit -n)"
        )
    return allowed - own


class Connections:
    """Takes connections from a listener, and at most ``most`` of them at once."""

    def __init__(self, listener: socket.socket, most: int) -> None:
        self._listener = listener
        self._most = most
        self._open: set[BoundedProtocol] = set()
        # since when each waits for its client, the longest first
        self._waiting: dict[BoundedProtocol, float] = {}
        self._answering: set[BoundedProtocol] = set()
        self._beginning: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._noticed = -_NOTICE_SECONDS

    @property
    def crowded(self) -> bool:
        """Whether requests fill all connections but the spare ones."""
        return len(self._answering) > self._most - SPARE_CONNECTIONS

    def accept(self, make_protocol: "Callable[[], BoundedProtocol]") -> None:
        """Take connections, now and until `close`."""
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept_some, make_protocol)

    def close(self) -> None:
        """Take no more connections, and close the connections that wait for their client; the
        others stay."""
        _cancel(self._retry)
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for connection in self._waiting:
            connection.transport.abort()

    def waits_for_client(self, connection: "BoundedProtocol") -> None:
        """Note that the connection has nothing to answer: from now on it may make room for another
        connection."""
        if connection in self._open:
            self._answering.discard(connection)
            self._waiting.pop(connection, None)
            self._waiting[connection] = asyncio.get_running_loop().time()

    def is_answering(self, connection: "BoundedProtocol") -> None:
        """Note that the connection has a whole request."""
        self._waiting.pop(connection, None)
        if connection in self._open:
            self._answering.add(connection)

    def forget(self, connection: "BoundedProtocol") -> None:
        """Note that the connection is closed."""
        self._open.discard(connection)
        self._answering.discard(connection)
        self._waiting.pop(connection, None)

    def _accept_some(self, make_protocol: "Callable[[], BoundedProtocol]") -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            is_full = len(self._open) >= self._most
            if is_full and not self._make_room():
                self._pause(_FULL_SECONDS, make_protocol)
                return
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # the whole system has no descriptor or no memory left
                self._notice("no connection can be accepted: %s", error.strerror or error)
                self._pause(_RETRY_SECONDS, make_protocol)
                return
            self._begin(client, make_protocol())
            if is_full:
                return  # it is not known whether there is another one to make room for

    def _pause(self, seconds: float, make_protocol: "Callable[[], BoundedProtocol]") -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        self._retry = loop.call_later(seconds, self.accept, make_protocol)

    def _begin(self, client: socket.socket, connection: "BoundedProtocol") -> None:
        self._open.add(connection)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(lambda: connection, client))
        self._beginning.add(task)

        def check(task: "asyncio.Task[Any]") -> None:
            self._beginning.discard(task)
            if task.cancelled() or task.exception() is not None:
                self.forget(connection)
                client.close()

        task.add_done_callback(check)

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client, if it has waited long
        enough."""
        self._notice(
            "%d connections are open, the most that can be: those whose clients send nothing end",
            self._most,
        )
        longest, since = next(iter(self._waiting.items()), (None, 0.0))
        if longest is None or asyncio.get_running_loop().time() - since < _PATIENCE_SECONDS:
            return False
        self.forget(longest)
        longest.transport.abort()
        return True

    def _notice(self, text: str, *facts: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._noticed >= _NOTICE_SECONDS:
            self._noticed = now
            _LOG.warning(text, *facts)


class BoundedProtocol(H11Protocol):
    """A connection that closes if its client takes more than ``client_seconds`` to send headers or
    read a full buffer.

    Malformed HTTP is answered in the form of every other error.
    """

    def __init__(self, *, connections: Connections, client_seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._connections = connections
        self._client_seconds = client_seconds
        self._headers_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._headers_due)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._connections.is_answering(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._headers_due)
        _cancel(self._stalled)
        self._connections.forget(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._client_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        answer = ApiError(400, msg, code="invalid_http", headers={"connection": "close"}).response()
        head = h11.Response(status_code=400, headers=answer.raw_headers)
        # the answer to an earlier request has begun
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _expect_request(self) -> None:
        _cancel(self._headers_due)
        self._headers_due = self.loop.call_later(self._client_seconds, self.transport.abort)
        # otherwise the end of the last answer would be lost
        if not self.transport.get_write_buffer_size():
            self._connections.waits_for_client(self)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
