"""The application: its paths, the checks before them, and the answers to errors."""

import hmac
import logging
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoserve.errors import NanoserveError, shown
from nanoserve.server import endpoints
from nanoserve.server.connections import Connections
from nanoserve.server.hosts import is_allowed
from nanoserve.server.http_bodies import ApiError, as_api_error
from nanoserve.server.service import Service

_LOG = logging.getLogger("nanoserve.server")
_WATCHED = ("/health", "/ready", "/metrics")
"""Paths that report the server's state; they are answered under overload, too."""


def make_app(service: Service, connections: Connections) -> Starlette:
    routes = [
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/", endpoints.models),  # some clients ask so; vLLM redirects them
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/version", endpoints.version),
        Route("/metrics", endpoints.metrics),
    ]
    handlers = dict.fromkeys(
        (NanoserveError, HTTPException, ClientDisconnect, Exception), _answer_error
    )
    keys = [key.encode() for key in service.api_keys]
    gate = Middleware(_Gate, keys=keys, hosts=service.allowed_hosts, connections=connections)
    app = Starlette(routes=routes, exception_handlers=handlers, middleware=[gate])
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, NanoserveError):
        return as_api_error(error).response()
    if isinstance(error, HTTPException):  # from the router: no such path, or not with this method
        if error.status_code == 404:
            return ApiError(
                404, "there is no such path", code="unknown_url", headers=error.headers
            ).response()
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # only for a log; the connection is closed
    # A bug: Starlette raises the error again, so that its traceback goes to the log too.
    number = secrets.token_hex(4)
    _LOG.error("error %s while answering %s", number, request.scope["path"])
    return ApiError(
        500, f"internal error {number}; the server's log has the details", code="internal_error"
    ).response()


@dataclass(frozen=True)
class _Gate:
    """Refuses requests that are ambiguous, that address the server by a wrong name, that show no
    valid key, or that would take the last connections.

    With ``hosts`` None, every name is allowed.
    """

    app: ASGIApp
    keys: Sequence[bytes] = field(repr=False)
    hosts: Collection[str] | None
    connections: Connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.app
        if scope["type"] == "http":
            refusal = self._refusal(scope, dict(scope["headers"]))
            if refusal is not None:
                answer = refusal.response()
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Request smuggling: a proxy that reads the other header would see another request after
            # the body.
            message = "the request has both Content-Length and Transfer-Encoding: send one of them"
            return ApiError(400, message, code="invalid_http", headers={"connection": "close"})
        host = headers.get(b"host")  # HTTP/1.0 may omit it; no browser does
        if self.hosts is not None and host is not None and not is_allowed(host, self.hosts):
            named = host.decode("latin-1")
            message = (
                f"the host {shown(named)} is none of this server's names: use localhost, or start "
                "it with "
            )
            return ApiError(
                403, message + "--allowed-hosts NAME", code="host_not_allowed", param="Host"
            )
        if self.keys and scope["path"] != "/health":  # a load balancer has no key
            key = self._shown_key(headers.get(b"authorization", b""))
            scope["api_key"] = key
            if key is None:
                message = (
                    "the API key is missing or wrong: send the header Authorization: Bearer KEY"
                )
                return ApiError(
                    401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"}
                )
        if self.connections.crowded and scope["path"] not in _WATCHED:
            message = "too many requests are being answered at once; try again later"
            return ApiError(503, message, code="too_many_connections", headers={"retry-after": "1"})
        return None

    def _shown_key(self, authorization: bytes) -> bytes | None:
        """The key that the client shows, if it is valid. Comparisons take the same time, right or
        wrong."""
        scheme, _, given = authorization.partition(b" ")
        matches = [key for key in self.keys if hmac.compare_digest(key, given.strip())]
        if not matches or scheme.lower() != b"bearer":
            return None
        return matches[0]
