"""A sweep: the same work at one load after another, each a row of the report."""

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.serving.records import LoadRun, figures
from nanoserve.benchmarks.serving.requests import RequestStyle, Work, offered_rate, poisson_arrivals, trace_arrivals
from nanoserve.benchmarks.serving.sending import RequestLoad, Sender
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.metrics import Slo
from nanoserve.measures.workloads import RequestShape

_WARM_UP_TOKENS = 16


class Point(msgspec.Struct, frozen=True):
    """How requests come."""

    concurrency: int | None = None
    """Number of clients of a closed loop; None means an open loop."""
    rate: float | None = None
    """Requests per second of an open loop; None takes the times of a trace as they are."""
    traced: bool = False
    """Whether the open loop follows a trace, and not a Poisson process."""

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} client" + ("s" if self.concurrency > 1 else "")
        if self.rate is None:
            return "trace"
        return f"{'trace at ' if self.traced else ''}{self.rate:g} requests/s"

    @property
    def tick(self) -> str:
        """Under a chart."""
        return str(self.concurrency) if self.concurrency else "trace" if self.rate is None else f"{self.rate:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBench:
    """Measures one server with one kind of work."""

    sender: Sender
    style: RequestStyle
    work: Work
    seed: int
    """Seed of the Poisson arrivals. Prompts are never repeated, whatever the seed."""
    slo: Slo | None
    """What a good answer keeps to."""
    foreign: ForeignLoad | None
    """Measures the load of other processes; None if the server's own process is unknown."""
    salt: str = field(default_factory=lambda: secrets.token_hex(8))

    def warm_up(self, count: int) -> None:
        """Send the first requests at once, with short answers, and forget the times.

        Raises:
            RuntimeFailure: if one of them fails: measuring would be in vain.
        """
        shapes = [
            RequestShape(shape.input_tokens, min(shape.output_tokens, _WARM_UP_TOKENS))
            for shape in self.work.shapes[:count]
        ]
        load = self._load(shapes, "warm-up")
        asyncio.run(load.open_loop([0.0] * len(shapes)))
        if failures := [record.failure for record in load.run().records if record.failure is not None]:
            raise RuntimeFailure(f"{len(failures)} of {len(shapes)} requests of the warm-up failed: {failures[0]}")

    def measure(
        self, point: Point, repeats: int, keep: Callable[[dict[str, Any]], None], answered: Callable[[], None]
    ) -> None:
        """Run the work at this load, ``repeats`` times; ``keep`` gets the row, also of a run that is interrupted.

        ``answered`` is called after every request.
        """
        runs: list[LoadRun] = []
        if self.foreign is not None:
            self.foreign.read()
        try:
            for repeat in range(1, repeats + 1):
                load = self._load(self.work.shapes, f"{point.name}/{repeat}", answered)
                try:
                    if point.concurrency is not None:
                        asyncio.run(load.closed_loop(point.concurrency))
                    else:
                        asyncio.run(load.open_loop(self._arrivals(point, repeat)))
                finally:
                    if (run := load.run()).records:
                        runs.append(run)
        finally:
            if runs:
                keep(self._row(point, runs))

    def _arrivals(self, point: Point, repeat: int) -> list[float]:
        """The same for the same seed; every repetition has its own, but for a trace's."""
        if point.traced:
            return trace_arrivals(self.work.times or (0.0,), point.rate)
        rate = math.inf if point.rate is None else point.rate
        return poisson_arrivals(rate, len(self.work.shapes), seed=self.seed * 1000 + repeat)

    def _load(
        self, shapes: Sequence[RequestShape], place: str, answered: Callable[[], None] = lambda: None
    ) -> RequestLoad:
        return RequestLoad(self.sender, self.style.prepare(shapes, f"{self.salt}/{place}"), answered)

    def _row(self, point: Point, runs: Sequence[LoadRun]) -> dict[str, Any]:
        open_loop = point.concurrency is None
        return {
            "case": point.name,
            "tick": point.tick,
            "concurrency": point.concurrency,
            "offered_requests_per_s": offered_rate(self._arrivals(point, 1)) if open_loop else None,
            "repeats": len(runs),
            **figures(runs, self.slo),
            "foreign_cores": None if self.foreign is None else self.foreign.read(),
        }
