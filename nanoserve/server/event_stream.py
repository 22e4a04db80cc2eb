"""Server-sent events, and noticing that a client is gone."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.server.api_errors import ClientGone

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the pieces
]
_DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


Emit = Callable[[object], Awaitable[None]]


class EventStream(Response):
    """An answer of events.

    Args:
        produce: sends the events one by one with the function it is given; cancelled when the client goes.
        close: called in any case when it is over.
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

        headers = _HEADERS + self._own_headers
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
