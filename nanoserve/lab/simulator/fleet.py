"""The loops that run engines: one engine on a real or a virtual clock, and a fleet of replicas in
virtual time."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from nanoserve.engine.dispatcher import Router, least_tokens
from nanoserve.engine.engine import Engine
from nanoserve.errors import UsageError, shown
from nanoserve.lab.simulator.executor import VOCAB_SIZE, SimulatedExecutor
from nanoserve.lab.simulator.result import ReplicaFigures
from nanoserve.record.metrics_observer import LatencyMetrics, LayoutTime, StepMetrics
from nanoserve.record.recorder import recorder_of
from nanoserve.request import Request
from nanoserve.scheduler.scheduler import Scheduler

MOST_REPLICAS = 1024  # each takes a megabyte or more, for its KV blocks alone


def admit(engine: Engine, request: Request) -> None:
    """Give a request to an engine that has worked until it came; raises UsageError if it can never
    run."""
    while engine.now() < request.arrival_time:
        engine.step(request.arrival_time)  # nothing is in flight: only time passes
    engine.add(request)


def drive(engine: Engine, requests: Iterable[Request]) -> None:
    """Run requests to their ends on a real or a virtual clock; observers of the engine's recorder
    see the results.

    The requests are in the order of their arrival times, on that clock, and are taken one at a
    time. Raises UsageError if one can never run.
    """
    for request in requests:
        while engine.has_work and engine.now() < request.arrival_time:
            engine.step(request.arrival_time)
        admit(engine, request)
    while engine.has_work:
        engine.step(None)


StageTime = tuple[float, float]
"""How long a stage computed, and how long its layout was current with something in flight."""


def bubble_share(stages: Iterable[StageTime]) -> float:
    """Share of the stages' working time in which they computed nothing; 0 if nothing was ever in
    flight."""
    times = list(stages)
    working = sum(in_flight for _, in_flight in times)
    if not working:
        return 0.0
    return 1 - sum(computing for computing, _ in times) / working


class Replica:
    """One engine of the fleet: its own scheduler, pipeline and KV blocks, and what is measured of
    it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: SimulatedExecutor,
        steps: StepMetrics,
        lives: LatencyMetrics,
    ) -> None:
        self.scheduler, self.executor, self.steps, self.lives = scheduler, executor, steps, lives
        self.engine = Engine(scheduler, executor, vocab_size=VOCAB_SIZE)
        self.recorder = recorder_of(self.engine)
        self.recorder.add(steps, lives)

    @property
    def layout_times(self) -> list[LayoutTime]:
        return self.steps.layout_times(self.executor.now())

    @property
    def stages(self) -> list[StageTime]:
        """Times of the stages of every layout, one layout after the other."""
        layouts = zip(self.executor.pipelines, self.layout_times, strict=True)
        return [
            (busy, time.working) for pipeline, time in layouts for busy in pipeline.busy_seconds
        ]

    def advance(self, until: float) -> float:
        """Work until then; returns the time before which only a request can give the engine
        something to do."""
        engine, due = self.engine, self.executor.now()
        while engine.has_work and engine.now() < until:
            engine.step(until)
            due = self.executor.due
        if not engine.has_work:
            return math.inf
        return due

    def figures(self, seconds: float) -> ReplicaFigures:
        """Metrics of this engine over the time of the whole fleet."""
        stages, lives = self.stages, self.lives
        bubbles: float | None = None
        if any(working for _, working in stages):
            bubbles = bubble_share(stages)
        return ReplicaFigures(
            requests=lives.requests,
            input_tokens=lives.input_tokens,
            output_tokens=lives.output_tokens,
            seconds=self.executor.now(),
            ttft_ms=lives.ttft.mean,
            tpot_ms=lives.tpot.mean,
            e2el_ms=lives.e2el.mean,
            bubble_share=bubbles,
            kv_occupancy=self.steps.occupancy.seconds / seconds,
            kv_peak=self.steps.occupancy.peak,
            preemptions=self.scheduler.table.preemptions,
        )


def round_robin() -> Router:
    """A router that picks the engines in turn, whatever their load."""
    turns = count()
    return lambda outstanding: next(turns) % len(outstanding)


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-tokens": lambda: least_tokens,
}
"""Choices of ``--router``."""


def make_router(name: str) -> Router:
    """A new router of that name; raises UsageError, listing the names, if there is none."""
    if name not in ROUTERS:
        raise UsageError(f"unknown router {shown(name)}; choose one of {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def check_replicas(number: int) -> None:
    if not 1 <= number <= MOST_REPLICAS:
        raise UsageError(f"a fleet has 1 to {MOST_REPLICAS} replicas, not {number}")


def drive_fleet(
    fleet: Sequence[Replica],
    router: Router,
    requests: Iterable[Request],
    is_over: Callable[[], bool],
) -> None:
    """Run requests to their ends, or once all have arrived, until ``is_over``. Raises UsageError if
    one can never run.

    Between two arrivals the engines have nothing to do with each other, so each works until the
    next one on its own. An engine is only advanced when its next result is due; until then it would
    make the same decision again.
    """
    due = [math.inf] * len(fleet)
    for request in requests:
        now = request.arrival_time
        for number, replica in enumerate(fleet):
            if due[number] <= now:
                due[number] = replica.advance(now)
        chosen = router([replica.scheduler.table.outstanding for replica in fleet])
        admit(fleet[chosen].engine, request)
        due[chosen] = now
    for replica in fleet:
        while replica.engine.has_work and not is_over():
            replica.engine.step(None)
