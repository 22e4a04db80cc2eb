"""Bodies over HTTP: JSON that is read within limits, and answers of server-sent events."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.server.api_errors import ApiError, ClientGone
from nanoserve.server.service import ClientLimits

_CLOSE = {"connection": "close"}
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must pass each event on at once
]
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")
Emit = Callable[[object], Awaitable[None]]


async def read_json_body(request: Request, limits: ClientLimits) -> bytes:
    """The body, undecoded.

    Raises:
        ApiError: 413 if it is too long, 408 if it is too slow, 415 if it is not declared as JSON.
        ClientGone: if the client hung up.
    """
    # A web page can make a browser post forms and plain text anywhere, but JSON only where that is allowed.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the header Content-Type: application/json", code="unsupported_media_type")
    message = f"the body is longer than {limits.body_bytes} bytes (--max-body-size)"
    too_long = ApiError(413, message, code="request_too_large", headers=_CLOSE)
    if int(request.headers.get("content-length", "0")) > limits.body_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.client_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_long
    except TimeoutError:
        message = f"the body did not arrive within {limits.client_seconds:g} s"
        raise ApiError(408, message, code="request_timeout", headers=_CLOSE) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


class EventStream(Response):
    """An answer of server-sent events.

    Args:
        produce: sends the events one by one with the function it is given; cancelled when the client goes.
        close: called at the end in any case.
    """

    def __init__(
        self,
        produce: Callable[[Emit], Coroutine[Any, Any, None]],
        close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._produce = produce
        self._close = close
        self._own_headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await until_client_goes(receive, self._send_all(send))
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        async def emit(event: object) -> None:
            data = b"data: " + msgspec.json.encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})

        headers = _EVENT_HEADERS + self._own_headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._produce(emit)
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})


async def until_client_goes(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client goes.

    Raises:
        ClientGone: if it went.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
