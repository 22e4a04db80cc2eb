"""Reading a request's body: no more than the limit, in no more than the time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from nanoserve.server.api_errors import ApiError, ClientGone
from nanoserve.server.service import Limits

_CLOSE = {"connection": "close"}


async def read_json_body(request: Request, limits: Limits) -> bytes:
    """The body, undecoded.

    Raises:
        ApiError: 413 for too long a body, 408 for too slow a one, 415 for anything but JSON.
        ClientGone: if the client hung up.
    """
    # A web page can make a browser post forms and plain text anywhere; JSON it may post only where it is allowed to.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "send the header Content-Type: application/json", code="unsupported_media_type")
    declared = request.headers.get("content-length", "0")
    if int(declared) > limits.body_bytes:
        raise _too_long(limits)
    try:
        async with asyncio.timeout(limits.client_seconds):
            return await _read(request, limits)
    except TimeoutError:
        message = f"the body did not arrive within {limits.client_seconds:g} s"
        raise ApiError(408, message, code="request_timeout", headers=_CLOSE) from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limits.body_bytes:
            raise _too_long(limits)
    return bytes(body)


def _too_long(limits: Limits) -> ApiError:
    message = f"the body is longer than {limits.body_bytes} bytes (--max-body-size)"
    return ApiError(413, message, code="request_too_large", headers=_CLOSE)
