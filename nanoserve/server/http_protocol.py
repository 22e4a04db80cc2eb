"""HTTP/1.1 by uvicorn and h11, with additional time limits.

A client that is slow to send its headers, or that stops reading its answer, is disconnected. Malformed HTTP is answered
in the form of every other error.
"""

import asyncio
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoserve.server.http_bodies import ApiError


class BoundedProtocol(H11Protocol):
    """One connection.

    Args:
        client_seconds: time for the headers of a request to arrive, and for a full buffer to drain.
    """

    def __init__(self, *arguments: Any, client_seconds: float, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._client_seconds = client_seconds
        self._headers_due: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._headers_due)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._headers_due)
        _cancel(self._stalled)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._client_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stalled)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with the usual error body, and close the connection."""
        body = msgspec.json.encode(ApiError(400, msg, code="invalid_http").body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        try:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # it followed a request whose answer has begun, so no other answer can be sent
        self.transport.close()

    def _expect_headers(self) -> None:
        _cancel(self._headers_due)
        self._headers_due = self.loop.call_later(self._client_seconds, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
