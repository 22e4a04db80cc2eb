"""Bodies over HTTP: JSON that is read within limits, and JSON answers. Errors have OpenAI's
form."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.errors import ModelError, NanoserveError, UsageError
from nanoserve.server.engine_client import EngineUnavailable, QueueFull
from nanoserve.utils.children import ProcessUnavailable

PIECE_BYTES = 1 << 20  # of a body that is sent
_CLOSE = {"connection": "close"}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ERRORS: tuple[tuple[type[NanoserveError], int, str], ...] = (
    (QueueFull, 429, "queue_full"),
    (ProcessUnavailable, 503, "process_unavailable"),
    (EngineUnavailable, 503, "engine_unavailable"),
    (UsageError, 400, "invalid_value"),
    # a template that passed its check at loading: these messages make it fail
    (ModelError, 400, "invalid_value"),
    (NanoserveError, 500, "engine_error"),
)
"""Status and code of each error of the request or of nanoserve; the first that fits counts."""

T = TypeVar("T")


class ApiError(NanoserveError):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status  # the HTTP status
        self.message = str(self)  # one line that says what to change
        self.code = code  # for programs, such as ``context_length_exceeded``
        self.param = param  # the wrong field of the request
        self.headers = dict(headers or {})  # in addition to the headers of every answer

    def body(self) -> dict[str, object]:
        """The JSON object that OpenAI's clients expect."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def response(self) -> Response:
        return JsonResponse(self.body(), status_code=self.status, headers=self.headers)


class JsonResponse(Response):
    """Sent in pieces, as fast as the client reads: an answer may have hundreds of megabytes."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for start in range(0, len(self.body), PIECE_BYTES):
            piece = self.body[start : start + PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


def as_api_error(error: NanoserveError) -> ApiError:
    """The answer to a client for an error of the request or of nanoserve."""
    if isinstance(error, ApiError):
        return error
    status, code = next((status, code) for kind, status, code in _ERRORS if isinstance(error, kind))
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = "1"
    return ApiError(status, str(error), code=code, headers=headers)


async def read_json_body(request: Request, longest: int, seconds: float) -> bytes:
    """The body, undecoded.

    Raises ApiError: 413 for more than ``longest`` bytes, 408 if it is too slow, 415 if it is not
    declared as JSON.
    """
    # A web page can make a browser post forms and plain text anywhere, but JSON only where that is
    # allowed.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, "send the header Content-Type: application/json", code="unsupported_media_type"
        )
    message = f"the body is longer than {longest} bytes (--max-body-size)"
    too_long = ApiError(413, message, code="request_too_large", headers=_CLOSE)
    if int(request.headers.get("content-length", "0")) > longest:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > longest:
                    raise too_long
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, message, code="request_timeout", headers=_CLOSE) from None
    return bytes(body)


async def until_client_goes(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, or cancel it when the client disconnects. Then raises
    ClientDisconnect."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
