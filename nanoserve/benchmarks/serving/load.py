"""Load: in an open loop requests come when they come, in a closed loop each waits for the answer to another."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from nanoserve.benchmarks.serving.records import RequestRecord, Run
from nanoserve.benchmarks.serving.requests import PreparedRequest
from nanoserve.benchmarks.serving.sending import Sender


class Load:
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

    def run(self) -> Run:
        """What has been measured so far; of a run that was cancelled, those answers that had come."""
        unfinished = len(self._requests) - len(self._records)
        ends = [self._now()] if unfinished else [record.ended for record in self._records]
        return Run(tuple(self._records), max(ends), unfinished)

    async def _client(self, pending: Iterator[PreparedRequest]) -> None:
        for request in pending:
            await self._send(request, self._now())

    async def _send(self, request: PreparedRequest, scheduled: float) -> None:
        self._records.append(await self._sender.send(request, scheduled, self._began))
        self._answered()

    def _now(self) -> float:
        return self._sender.clock() - self._began
