"""Streamed requests on asyncio and h11: little work for each piece, as client and server share the machine.

Every request has a connection of its own; opening it counts. What goes wrong becomes a record with a failure, never an
exception: a benchmark that lost its failures would tell of the good ones alone. In an open loop requests are sent at
their arrival times, in a closed loop each waits for the answer to another.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus

import h11
import msgspec

from nanoserve.benchmarks.serving.records import LoadRun, RequestRecord
from nanoserve.benchmarks.serving.requests import PreparedRequest
from nanoserve.client.address import ServerAddress, key_headers
from nanoserve.client.events import BrokenStream, EventReader, ServerUsage, error_facts, printable

_READ_BYTES = 1 << 16
_LONGEST_ERROR = 1 << 16
_SHOWN = 120
"""Characters of a server's own words in the name of a failure."""

Clock = Callable[[], float]


class _Failed(Exception):
    """A request got no complete answer; the message is the name of the failure."""


class _Answer:
    """What has come of one answer."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: ServerUsage | None = None
        self.ended: float | None = None
        self.events = EventReader()

    def take(self, data: bytes, now: float) -> None:
        """Bytes of the body, which came at this moment."""
        for chunk in self.events.push(data):
            if chunk.error is not None:
                words = _words_of(chunk.error)
                words = "unknown" if words is None else words
                raise _Failed(f"an error within the stream: {words}")
            if chunk.usage is not None:
                self.usage = chunk.usage
            for choice in chunk.choices or ():
                if choice.answer or choice.thinking:
                    self.times.append(now)
                if choice.finish_reason:
                    self.ended = now

    def as_record(self, request: PreparedRequest, scheduled: float, started: float) -> RequestRecord:
        """The record of an answer that has ended.

        Raises:
            _Failed: if it holds no token.
        """
        usage = self.usage or ServerUsage()
        tokens = len(self.times) if usage.completion_tokens is None else usage.completion_tokens
        last = [moment for moment in (self.ended, *self.times[-1:]) if moment is not None]
        if not tokens or not last:
            raise _Failed("an answer without a token")
        shape, given = request.shape, usage.prompt_tokens
        return RequestRecord(
            scheduled=scheduled,
            started=started,
            ended=max(last),
            text_times=tuple(self.times),
            input_tokens=shape.input_tokens if given is None else given,
            output_tokens=tokens,
            cached_tokens=usage.cached_tokens or 0,
            counted=usage.completion_tokens is not None,
            wanted_tokens=shape.output_tokens,
        )


class Sender:
    """Sends requests to one path of one server.

    Args:
        timeout: seconds for a whole answer.
        clock: read whenever something comes.
    """

    def __init__(
        self,
        address: ServerAddress,
        path: str,
        *,
        api_key: str | None = None,
        timeout: float,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._address = address
        self._target = address.api + path
        self._timeout = timeout
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._headers = {
            "host": address.host_header,
            "user-agent": "nanoserve-bench",
            "content-type": "application/json",
            "connection": "close",
        } | key_headers(api_key)

    async def send(self, request: PreparedRequest, scheduled: float, began: float = 0.0) -> RequestRecord:
        """Send it now and wait for the end of its answer; times are told from ``began`` on."""
        started = self.clock() - began
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._exchange(request.body, began)
            return answer.as_record(request, scheduled, started)
        except TimeoutError:
            failure = f"no complete answer within {self._timeout:g} s"
        except _Failed as error:
            failure = str(error)
        except BrokenStream:
            failure = "a stream that makes no sense"
        except h11.RemoteProtocolError:
            failure = "the connection ended half-way"
        except OSError as error:
            failure = (
                os.strerror(error.errno) if error.errno else printable(str(error))[:_SHOWN] or type(error).__name__
            )
        ended = self.clock() - began
        wanted = request.shape.output_tokens
        return RequestRecord(scheduled=scheduled, started=started, ended=ended, wanted_tokens=wanted, failure=failure)

    async def _exchange(self, body: bytes, began: float) -> _Answer:
        address = self._address
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=self._tls)
        try:
            http = h11.Connection(h11.CLIENT)
            headers = [*self._headers.items(), ("content-length", str(len(body)))]
            head = http.send(h11.Request(method="POST", target=self._target, headers=headers)) or b""
            writer.write(head + (http.send(h11.Data(data=body)) or b"") + (http.send(h11.EndOfMessage()) or b""))
            return await self._receive(http, reader, began)
        finally:
            writer.transport.abort()  # no farewell: on cancelling, the server shall notice at once

    async def _receive(self, http: h11.Connection, reader: asyncio.StreamReader, began: float) -> _Answer:
        """The answer to its end.

        Raises:
            _Failed: if it is an error, or has no proper end.
        """
        answer, status, now = _Answer(), 0, 0.0
        refusal = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_READ_BYTES)
                now = self.clock() - began
                http.receive_data(data)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == HTTPStatus.OK:
                    answer.take(event.data, now)
                elif len(refusal) < _LONGEST_ERROR:
                    refusal += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            elif not isinstance(event, h11.InformationalResponse):
                raise _Failed("the connection ended half-way")
        if status != HTTPStatus.OK:
            raise _Failed(_refused(status, refusal))
        if not (answer.events.done or answer.ended):
            raise _Failed("a stream without an end" if answer.times else "an answer that is no stream")
        return answer


def _refused(status: int, body: bytes) -> str:
    """``HTTP 429: the queue is full``"""
    words = None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        words = _words_of(msgspec.json.decode(body))
    return f"HTTP {status}" if words is None else f"HTTP {status}: {words}"


def _words_of(error: object) -> str | None:
    """The server's own words, shortened; None if it said nothing that can be read."""
    facts = error_facts(error)
    return None if facts is None else printable(facts.message)[:_SHOWN]


class RequestLoad:
    """One run of requests against a server; what has been measured can be had at any time.

    Exactly one of ``open_loop`` and ``closed_loop`` is awaited, once. ``answered`` is called after every request.
    """

    def __init__(
        self, sender: Sender, requests: Sequence[PreparedRequest], answered: Callable[[], None] = lambda: None
    ) -> None:
        self._answered = answered
        self._sender = sender
        self._requests = requests
        self._records: list[RequestRecord] = []
        self._began = 0.0

    async def open_loop(self, arrivals: Sequence[float]) -> None:
        """Send each request when its time has come, in seconds from now, whatever became of those before it."""
        self._began = self._sender.clock()
        order = sorted(zip(arrivals, self._requests, strict=True), key=lambda pair: pair[0])
        async with asyncio.TaskGroup() as group:
            for arrival, request in order:
                if (early := arrival - self._now()) > 0:
                    await asyncio.sleep(early)
                group.create_task(self._send(request, arrival))

    async def closed_loop(self, concurrency: int) -> None:
        """So many clients, each of which sends the next request when its last one was answered."""
        self._began = self._sender.clock()
        pending = iter(self._requests)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self._requests))):
                group.create_task(self._client(pending))

    def run(self) -> LoadRun:
        """What has been measured so far; of a run that was cancelled, those answers that had come."""
        unfinished = len(self._requests) - len(self._records)
        ends = [self._now()] if unfinished else [record.ended for record in self._records]
        return LoadRun(tuple(self._records), max(ends), unfinished)

    async def _client(self, pending: Iterator[PreparedRequest]) -> None:
        for request in pending:
            await self._send(request, self._now())

    async def _send(self, request: PreparedRequest, scheduled: float) -> None:
        self._records.append(await self._sender.send(request, scheduled, self._began))
        self._answered()

    def _now(self) -> float:
        return self._sender.clock() - self._began
