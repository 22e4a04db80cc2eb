"""Requests through an engine whose executor stays, under a scheduler of their own: what came out, when. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.metrics import RequestTiming
from nanoserve.measures.workloads import RequestShape, random_prompts
from nanoserve.request import Request, SamplingParams, SequenceUpdate
from nanoserve.runtime.trace.stage_times import StageTimes
from nanoserve.runtime.trace.traced_executor import Observed
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.record import Record, record_run

_PATIENCE = 5.0
"""Seconds within which workers report what they did for the last plan; they do so in milliseconds."""
_LOOK = 0.01


class TokenTimes:
    """When the tokens of each request became known."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._times: dict[str, list[float]] = {request.request_id: [] for request in requests}

    def on_updates(self, now: float, updates: Sequence[SequenceUpdate]) -> None:
        """What sequences gained at this moment.

        Raises:
            RuntimeFailure: if one cannot go on.
        """
        for update in updates:
            if update.sequence.error is not None:
                raise RuntimeFailure(update.sequence.error)
            self._times[update.request_id] += [now] * len(update.new_tokens)

    @property
    def timings(self) -> tuple[RequestTiming, ...]:
        """Of each request, from its arrival on."""
        return tuple(
            RequestTiming(
                len(request.prompt), tuple(time - request.arrival_time for time in self._times[request.request_id])
            )
            for request in self._requests
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of some requests, really or simulated."""

    arrivals: tuple[float, ...]
    """Of each request, in seconds from the first."""
    timings: tuple[RequestTiming, ...]
    """Of each request, in the same order."""

    @property
    def makespan(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(arrival + timing.e2el for arrival, timing in zip(self.arrivals, self.timings, strict=True))

    @classmethod
    def of(cls, requests: Sequence[Request], tokens: TokenTimes) -> "Outcome":
        first = requests[0].arrival_time
        return cls(tuple(request.arrival_time - first for request in requests), tokens.timings)


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """One run for real."""

    outcome: Outcome
    record: Record
    """What the engine took in and answered, on the executor's clock."""
    stage_times: tuple[StageTimes, ...]
    """Of every worker and plan; none where the executor is a single process."""
    preemptions: int


def make_requests(
    shapes: Sequence[RequestShape], arrivals: Sequence[float], vocab_size: int, seed: int
) -> list[Request]:
    """Random prompts with answers of exactly the wanted lengths, taken greedily; equal for equal seeds.

    Args:
        arrivals: seconds from the beginning of the run, ascending.
    """
    prompts = random_prompts([shape.input_tokens for shape in shapes], vocab_size, seed)
    return [
        Request(
            f"request-{number}",
            prompt,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=shape.output_tokens),
            seed=0,
            arrival_time=arrival,
        )
        for number, (prompt, shape, arrival) in enumerate(zip(prompts, shapes, arrivals, strict=True))
    ]


def run_requests(
    executor: Executor,
    make_scheduler: Callable[[], Scheduler],
    requests: Sequence[Request],
    *,
    vocab_size: int,
    workers: int = 0,
) -> PipelineRun:
    """Run requests to their ends under a new scheduler, and collect what the workers say of it.

    Args:
        executor: with nothing in flight; it is not closed.
        requests: with arrival times from the beginning of the run on, in order.
        workers: how many there are that say what they do; 0 where nobody does.

    Raises:
        UsageError: if a request can never run.
        RuntimeFailure: if one fails, or a worker dies or does not say what it did.
    """
    if isinstance(executor, Observed):
        executor.take_times()  # of what was before
    scheduler = make_scheduler()
    began = executor.now()
    moved = [replace(request, arrival_time=began + request.arrival_time) for request in requests]
    tokens = TokenTimes(moved)
    record = record_run(Engine(scheduler, executor, vocab_size=vocab_size), moved, tokens.on_updates)
    if losses := [result.lost for result in record.results.values() if result.lost is not None]:
        raise RuntimeFailure(f"nothing can be measured of a run in which workers die: {losses[0]}")
    times = all_times(executor, len(record.plans) * workers)
    return PipelineRun(Outcome.of(moved, tokens), record, times, scheduler.preemptions)


def all_times(executor: Executor, wanted: int) -> tuple[StageTimes, ...]:
    """What all workers did for all plans; reports of the last ones may come behind the results."""
    times: list[StageTimes] = []
    until = executor.now() + _PATIENCE
    while isinstance(executor, Observed) and len(times) < wanted:
        times += executor.take_times()
        if len(times) < wanted:
            if executor.now() > until:
                raise RuntimeFailure("the workers did not report what they did for every plan")
            executor.collect(executor.now() + _LOOK)
    return tuple(times)
