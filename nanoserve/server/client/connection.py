"""A blocking HTTP client for one request at a time, from the standard library, so that it starts at
once.

It connects to the server directly, follows no redirects and reads no environment variables: a key
is sent only to the server that the user named.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.server.client.address import ServerAddress, key_headers
from nanoserve.server.client.events import (
    BrokenStream,
    Chunk,
    EventReader,
    error_facts,
    printable,
    read_error,
)

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 600.0
"""A server may send nothing for a long time while it computes a long prompt."""
_READ_BYTES = 1 << 16
_LONGEST_ERROR = 1 << 16
_LONGEST_BODY = 1 << 24
_CONTEXT_CODES = ("context_length_exceeded", "exceed_context_size_error")
_CONTEXT_WORDS = "maximum context length"
_HINTS = {
    401: "give a key with --api-key or NANOSERVE_API_KEY",
    403: "give another key with --api-key or NANOSERVE_API_KEY",
}
NO_SUCH_PATH = (404, 405)
"""Statuses of a server that does not have a path."""


class ServerRefused(RuntimeFailure):
    """The server answered with an error."""

    def __init__(
        self,
        message: str,
        status: int,
        *,
        context_full: bool = False,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status  # the HTTP status
        self.context_full = context_full  # whether the prompt does not fit into the model's context
        self.retry_after = retry_after  # seconds after which to ask again, if the server names them


class ServerLost(RuntimeFailure):
    """The server cannot be reached, or it closed the connection."""


class ApiClient:
    """Sends requests to one server. Each has a connection of its own, and closing it cancels the
    request."""

    def __init__(self, address: ServerAddress, api_key: str | None = None) -> None:
        self.address = address
        self.headers = {"user-agent": "nanoserve"} | key_headers(api_key)  # of every request

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Chunk, None, None]:
        """The chunks of a streamed answer as they come; closing the generator closes the
        connection.

        Raises ServerRefused for an error, at once or within the stream; ServerLost if the server
        cannot be reached or ends the answer half-way; BrokenStream if the answer is not a stream of
        chunks.
        """
        with self._response(path, body) as response:
            if "text/event-stream" not in response.getheader("content-type", ""):
                raise BrokenStream(
                    f"{self.address} did not answer with a stream: is it an OpenAI-compatible "
                    "server?"
                )
            reader = EventReader()
            finished = False
            while not reader.done and (data := response.read1(_READ_BYTES)):
                for chunk in reader.push(data):
                    if chunk.error is not None:
                        raise self._broken_off(chunk.error, response.status)
                    if any(choice.finish_reason for choice in chunk.choices or ()):
                        finished = True
                    yield chunk
            if not (reader.done or finished):
                raise ServerLost(f"{self.address} ended the answer half-way")

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The decoded JSON of the answer to a GET, or to a POST of the body.

        Raises ServerRefused, ServerLost, or BrokenStream if the answer is no JSON.
        """
        with self._response(path, body) as response:
            content = response.read(_LONGEST_BODY)
        try:
            return msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            message = (
                f"{self.address}{path} did not answer with JSON: is it an OpenAI-compatible server?"
            )
            raise BrokenStream(message) from None

    def _connect(self) -> "HTTPConnection":
        # here and below: late, because it is large
        from http.client import HTTPConnection, HTTPSConnection

        host, port = self.address.host, self.address.port
        connection = HTTPConnection(host, port, timeout=_CONNECT_SECONDS)
        if self.address.scheme == "https":
            from ssl import create_default_context

            context = create_default_context()
            connection = HTTPSConnection(host, port, timeout=_CONNECT_SECONDS, context=context)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise ServerLost(f"cannot reach {self.address}: {_reason(error)}") from None
        connection.sock.settimeout(_SILENCE_SECONDS)
        return connection

    @contextmanager
    def _response(
        self, path: str, body: Mapping[str, Any] | None
    ) -> Generator["HTTPResponse", None, None]:
        """Send a request and wait for the head of the answer; raises ServerRefused for an error
        status."""
        from http.client import HTTPException, IncompleteRead

        method = "GET"
        content = None
        headers = self.headers
        if body is not None:
            method = "POST"
            content = json.dumps(body).encode()
            headers = headers | {"content-type": "application/json"}
        connection = self._connect()
        try:
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                raise self._refused(path, response)
            yield response
        except IncompleteRead:
            raise ServerLost(f"{self.address} ended the answer half-way") from None
        except (OSError, HTTPException) as error:
            raise ServerLost(f"the connection to {self.address} broke: {_reason(error)}") from None
        finally:
            connection.close()

    def _broken_off(self, error: Any, status: int) -> ServerRefused:
        """The failure for an error that the server sends within a stream."""
        facts = error_facts(error)
        message = "an error"
        if facts is not None:
            message = facts.message
        return ServerRefused(f"{self.address}: {message}", status)

    def _refused(self, path: str, response: "HTTPResponse") -> ServerRefused:
        facts = read_error(response.read(_LONGEST_ERROR))
        reason = f"{response.reason or 'no reason'} ({path})"
        if facts is not None:
            reason = facts.message
        message = f"{self.address} answered {response.status}: {reason}"
        wait = response.getheader("retry-after", "")
        seconds = None
        if re.fullmatch("[0-9]{1,6}", wait):  # the other form is a date
            seconds = int(wait)
        hint = _HINTS.get(response.status)
        if hint:
            message += f" ({hint})"
        elif seconds is not None:
            message += f" (it asks to wait {seconds} s)"
        full = facts is not None and (
            facts.code in _CONTEXT_CODES or _CONTEXT_WORDS in facts.message
        )
        return ServerRefused(message, response.status, context_full=full, retry_after=seconds)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class ModelCard(msgspec.Struct, frozen=True):
    """An entry of /v1/models. The length of the context is an extra of nanoserve and vLLM."""

    id: str
    max_model_len: int | None = None

    @property
    def name(self) -> str:
        """The id in a form that is safe to print."""
        return printable(self.id)


class _ModelList(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


def served_models(client: ApiClient) -> tuple[ModelCard, ...]:
    """The models that the server lists. Raises NanoserveError if it cannot be reached, or
    refuses."""
    path = f"{client.address.api}/models"
    try:
        return msgspec.convert(client.ask(path), _ModelList).data
    except msgspec.ValidationError as error:
        raise RuntimeFailure(f"{client.address}{path} is no list of models: {error}") from None


def served_model(client: ApiClient, wanted: str | None, notify: Callable[[str], None]) -> ModelCard:
    """The wanted model, or the first that the server lists; ``notify`` gets a line if there are
    several.

    A wanted model need not be listed: some servers have more models than they list. Raises
    NanoserveError if the server cannot be reached or refuses, and if no model is wanted and none is
    listed.
    """
    try:
        found = served_models(client)
    except ServerRefused as error:
        if wanted is None or error.status not in NO_SUCH_PATH:
            raise
        found = ()
    if wanted is not None:
        return next((card for card in found if card.id == wanted), ModelCard(wanted))
    if not found:
        raise UsageError("the server lists no model: name one with --model")
    if len(found) > 1:
        names = ", ".join(card.id for card in found)
        notify(
            f"the server has {len(found)} models ({names}): this is {found[0].id}, --model takes "
            "another"
        )
    return found[0]
