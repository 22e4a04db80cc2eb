"""Streamed requests on asyncio and h11: little work for each piece, as client and server share the
machine.

Every request has a connection of its own; opening it counts. A request that goes wrong becomes a
record with a failure, never an exception: a benchmark that drops its failures reports only the good
requests.
"""

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import h11

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.rounds import Repeating, most_known, shown_rounds
from nanoserve.lab.benchmarks.serving.records import DoneRun, LoadRun, RequestRecord, figures
from nanoserve.lab.benchmarks.serving.requests import (
    Point,
    PreparedRequest,
    RequestStyle,
    Work,
    offered_rate,
)
from nanoserve.record.metrics import Slo
from nanoserve.request import RequestShape
from nanoserve.server.client.connection import ApiClient
from nanoserve.server.client.events import (
    BrokenStream,
    ErrorFacts,
    EventReader,
    ServerUsage,
    error_facts,
    printable,
    read_error,
)

_READ_BYTES = 1 << 16
_LONGEST_ERROR = 1 << 16
_SHOWN = 120  # characters of a server's own words in the name of a failure
_WARM_UP_TOKENS = 16

Clock = Callable[[], float]  # seconds since the beginning of the run


class _Failed(Exception):
    """A request got no complete answer; the message is the name of the failure."""


class Sender:
    """Sends requests to one path of a client's server, with ``timeout`` seconds for a whole
    answer."""

    def __init__(self, client: ApiClient, path: str, *, timeout: float) -> None:
        self._address = address = client.address
        self._target = address.api + path
        self._timeout = timeout
        self._tls: ssl.SSLContext | None = None
        if address.scheme == "https":
            self._tls = ssl.create_default_context()
        self._headers = client.headers | {
            "host": address.host_header,
            "user-agent": "nanoserve-bench",
            "content-type": "application/json",
            "connection": "close",
        }

    async def send(self, request: PreparedRequest, scheduled: float, now: Clock) -> RequestRecord:
        """Send it now and wait for the end of its answer."""
        shape = request.shape
        record = RequestRecord(
            scheduled=scheduled, started=now(), wanted_tokens=shape.output_tokens
        )
        record.input_tokens = shape.input_tokens
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(request.body, record, now)
            return record
        except TimeoutError:
            record.failure = f"no complete answer within {self._timeout:g} s"
        except _Failed as error:
            record.failure = str(error)
        except BrokenStream:
            record.failure = "a stream that makes no sense"
        except h11.RemoteProtocolError:
            record.failure = "the connection ended half-way"
        except OSError as error:
            record.failure = printable(str(error))[:_SHOWN] or type(error).__name__
            if error.errno:
                record.failure = os.strerror(error.errno)
        record.ended = now()
        return record

    async def _exchange(self, body: bytes, record: RequestRecord, now: Clock) -> None:
        address = self._address
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=self._tls)
        try:
            http = h11.Connection(h11.CLIENT)
            headers = self._headers | {"content-length": str(len(body))}
            request = h11.Request(method="POST", target=self._target, headers=list(headers.items()))
            writer.write(
                b"".join(
                    http.send(one) or b""
                    for one in (request, h11.Data(data=body), h11.EndOfMessage())
                )
            )
            await _receive(http, reader, record, now)
        finally:
            writer.transport.abort()  # the server notices at once when a request is cancelled


async def _receive(
    http: h11.Connection, reader: asyncio.StreamReader, record: RequestRecord, now: Clock
) -> None:
    """Read the answer to its end, into the record. Raises _Failed for an error, no proper end, or
    no token."""
    events, usage, status, refusal = EventReader(), ServerUsage(), 0, b""
    moment, finished = 0.0, False
    while not isinstance(event := http.next_event(), h11.EndOfMessage):
        if event is h11.NEED_DATA:
            data = await reader.read(_READ_BYTES)
            moment = now()
            http.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status != HTTPStatus.OK:
            if len(refusal) < _LONGEST_ERROR:
                refusal += event.data
        elif isinstance(event, h11.Data):
            for chunk in events.push(event.data):
                if chunk.error is not None:
                    raise _Failed(
                        "an error within the stream: "
                        f"{_words_of(error_facts(chunk.error), 'unknown')}"
                    )
                usage = chunk.usage or usage
                for choice in chunk.choices or ():
                    if choice.answer or choice.thinking:
                        record.text_times.append(moment)
                        record.ended = moment
                    if choice.finish_reason:
                        record.ended, finished = moment, True
        elif not isinstance(event, h11.InformationalResponse):
            raise _Failed("the connection ended half-way")
    if status != HTTPStatus.OK:
        raise _Failed(f"HTTP {status}{_words_of(read_error(refusal), '', ': ')}")
    if not (events.done or finished):
        if record.text_times:
            raise _Failed("a stream without an end")
        raise _Failed("an answer that is no stream")
    record.count(usage)
    if not record.output_tokens or not (finished or record.text_times):
        raise _Failed("an answer without a token")


def _words_of(facts: ErrorFacts | None, nothing: str, before: str = "") -> str:
    """The server's own words, shortened; `nothing` if it said nothing that can be read."""
    if facts is None:
        return nothing
    return f"{before}{printable(facts.message)[:_SHOWN]}"


async def send_all(
    sender: Sender,
    requests: Sequence[PreparedRequest],
    arrivals: Sequence[float],
    run: LoadRun,
    clients: int | None = None,
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Send each request when its time has come, in seconds from now, whatever became of those
    before it. With ``clients``, a closed loop: no more requests are on their way, and the next
    one's time comes when one ends. ``run`` gets every record as soon as it is complete, and keeps
    what it has if this is cancelled."""
    began, run.unfinished = time.perf_counter(), len(requests)
    free = asyncio.Semaphore(clients or len(requests))

    def now() -> float:
        return time.perf_counter() - began

    async def send(request: PreparedRequest, scheduled: float) -> None:
        run.records.append(await sender.send(request, scheduled, now))
        run.unfinished -= 1
        answered()

    try:
        async with asyncio.TaskGroup() as group:
            for arrival, request in sorted(
                zip(arrivals, requests, strict=True), key=lambda pair: pair[0]
            ):
                if (early := arrival - now()) > 0:
                    await asyncio.sleep(early)
                await free.acquire()
                if clients is not None:
                    arrival = now()
                task = group.create_task(send(request, arrival))
                task.add_done_callback(lambda _: free.release())
    finally:
        if run.unfinished:
            run.seconds = now()
        else:
            run.seconds = max(record.ended for record in run.records)


def send_at_once(sender: Sender, requests: Sequence[PreparedRequest], name: str) -> LoadRun:
    """Send all requests now. Raises RuntimeFailure, which calls them by this name, if one of them
    fails."""
    run = LoadRun()
    asyncio.run(send_all(sender, requests, [0.0] * len(requests), run))
    if failures := [record.failure for record in run.records if record.failure is not None]:
        raise RuntimeFailure(f"{len(failures)} of {len(requests)} {name} failed: {failures[0]}")
    return run


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    sender: Sender
    style: RequestStyle
    work: Work
    seed: int  # seed of the Poisson arrivals. Prompts are never repeated, whatever the seed
    slo: Slo | None  # what a good answer keeps to
    # measures the load of other processes; None if the server's own process is unknown
    foreign: ForeignLoad | None
    repeating: Repeating
    done: list[DoneRun] = field(default_factory=list)  # the runs of all loads that have ended
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def warm_up(self, count: int) -> None:
        """Send the first requests at once, with short answers, and forget the times. Raises
        RuntimeFailure if one of them fails: measuring would be in vain."""
        first = self.work.shapes[:count]
        shapes = [
            RequestShape(one.input_tokens, min(one.output_tokens, _WARM_UP_TOKENS)) for one in first
        ]
        send_at_once(
            self.sender,
            self.style.prepare(shapes, f"{self.salt}/warm-up"),
            "requests of the warm-up",
        )

    def measure(
        self,
        point: Point,
        repeats: int,
        keep: Callable[[dict[str, Any]], None],
        answered: Callable[[], None],
    ) -> list[LoadRun]:
        """Run the work at this load until ``repeats`` runs count, or the time for repeating
        disturbed ones is spent.

        ``keep`` gets the row, also of a run that is interrupted; it is of the runs that count or,
        where none does, of all. They are returned. ``answered`` is called after every request.
        Every run has its own prompts and Poisson arrivals.
        """
        runs: list[LoadRun] = []
        ended: list[DoneRun] = []

        def one_run(number: int) -> DoneRun:
            arrivals = point.arrivals(self.work, self.seed * 1000 + number)
            requests = self.style.prepare(self.work.shapes, f"{self.salt}/{point.name}/{number}")
            runs.append(LoadRun())
            self._foreign_cores()
            asyncio.run(
                send_all(self.sender, requests, arrivals, runs[-1], point.concurrency, answered)
            )
            return DoneRun(foreign_cores=self._foreign_cores(), run=runs[-1])

        shown: list[LoadRun] = []
        try:
            for one in self.repeating.rounds(one_run, repeats):
                ended.append(one)
        finally:
            self.done.extend(ended)
            interrupted = [run for run in runs[len(ended) :] if run.records]
            shown = [one.run for one in shown_rounds(ended) if one.run.records] + interrupted
            if shown:
                row: dict[str, Any] = {
                    "case": point.name,
                    "tick": point.tick,
                    "concurrency": point.concurrency,
                }
                row["offered_requests_per_s"] = None
                if point.concurrency is None:
                    row["offered_requests_per_s"] = offered_rate(
                        point.arrivals(self.work, self.seed * 1000 + 1)
                    )
                foreign = most_known(one.foreign_cores for one in shown_rounds(ended))
                keep(
                    {
                        **row,
                        "repeats": len(shown),
                        **figures(shown, self.slo),
                        "foreign_cores": foreign,
                    }
                )
        return shown

    def _foreign_cores(self) -> float | None:
        if self.foreign is None:
            return None
        return self.foreign.read()
