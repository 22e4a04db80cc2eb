"""Answers that are errors: OpenAI's error body, with the HTTP status that fits."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from nanoserve.errors import ModelError, NanoserveError, UsageError
from nanoserve.processes.children import ProcessKilled
from nanoserve.server.engine_client import EngineUnavailable, QueueFull

_LONGEST_MESSAGE = 1000
_RETRY_SECONDS = "1"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ClientGone(Exception):
    """The client has hung up, so there is nothing to answer."""


class ApiError(Exception):
    """An answer that is an error."""

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
        self.message = message[:_LONGEST_MESSAGE]  # one line that says what to change
        self.code = code  # for programs, such as ``context_length_exceeded``
        self.param = param  # the wrong field of the request
        self.headers = dict(headers or {})  # in addition to those of every answer

    def body(self) -> dict[str, object]:
        """The JSON object that OpenAI's clients expect."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer as HTTP."""
        return JsonResponse(self.body(), status_code=self.status, headers=self.headers)


class JsonResponse(Response):
    """A JSON answer, encoded by msgspec."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return msgspec.json.encode(content)


def as_api_error(error: ApiError | NanoserveError) -> ApiError:
    """The answer to a client for an error of the request or of nanoserve."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": _RETRY_SECONDS})
    if isinstance(error, ProcessKilled):
        return ApiError(503, str(error), code="process_killed", headers={"retry-after": _RETRY_SECONDS})
    if isinstance(error, EngineUnavailable):
        return ApiError(503, str(error), code="engine_unavailable", headers={"retry-after": _RETRY_SECONDS})
    # A ModelError here is a template that passed its check at loading, so these messages make it fail.
    if isinstance(error, UsageError | ModelError):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, str(error), code="engine_error")
