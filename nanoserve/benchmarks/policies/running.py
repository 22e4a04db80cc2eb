"""Requests through an engine whose executor stays, under a scheduler of their own, recorded. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from nanoserve.benchmarks.policies.variants import PolicyVariant
from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.workloads import RequestShape, random_prompts
from nanoserve.record.events import Worked
from nanoserve.record.recorder import Telling
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import Executor, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.replay import record_run

_PATIENCE = 5.0
"""Seconds within which workers report what they did for the last plan; they do so in milliseconds."""
_LOOK = 0.01


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
) -> RunRecord:
    """Run requests to their ends under a new scheduler; the record has the times that workers report.

    Args:
        executor: with nothing in flight; it is not closed.
        requests: with arrival times from the beginning of the run on, in order.
        workers: number of workers that report their times; 0 without any.

    Raises:
        UsageError: if a request can never run.
        RuntimeFailure: if one fails, workers die, attention on the CPU is lost, or a worker does not report its times.
    """
    if isinstance(executor, Telling):
        executor.take_times()  # discard the times of earlier runs
    began = executor.now()
    moved = [replace(request, arrival_time=began + request.arrival_time) for request in requests]
    engine = Engine(make_scheduler(), executor, vocab_size=vocab_size)
    record = record_run(engine, moved)
    record.check()
    wanted, until = workers * sum(bool(plan.rows) for plan in record.plans), executor.now() + _PATIENCE
    while (
        sum(len(event.stages) for event in record.of(Worked)) < wanted
    ):  # reports of the last plans may come behind the results
        if executor.now() > until:
            raise RuntimeFailure("the workers did not report what they did for every plan")
        engine.recorder.collect(executor.now() + _LOOK)
    return record


class _InLayout:
    """Workers that stay in another layout than their first one; the scheduler knows no other layout."""

    def __init__(self, executor: Executor, layout: int) -> None:
        self.max_in_flight = executor.max_in_flight
        self.feeds_tokens = executor.feeds_tokens
        self.ready = executor.ready
        self.collect, self.now, self.close = executor.collect, executor.now, executor.close
        if isinstance(executor, Telling):
            self.take_times = executor.take_times
        self._executor = executor
        self._layout = layout

    def submit(self, plan: StepPlan) -> None:
        self._executor.submit(msgspec.structs.replace(plan, layout=self._layout))


def enter_layout(executor: Executor, layout: int) -> None:
    """Have the workers in that layout, whatever layout the run before has left them in; nothing is in flight.

    Raises:
        RuntimeFailure: if they die.
    """
    current: int = getattr(executor, "layout", 0)  # only workers may have several
    if current == layout:
        return
    executor.submit(StepPlan(0, layout=current, transition=layout))
    results: list[StepResult] = []
    while not results:
        results = executor.collect(None)
    if results[0].lost is not None:
        raise RuntimeFailure(f"the workers died when they changed their layout: {results[0].lost}")


def run_variant(variant: PolicyVariant, requests: Sequence[Request], *, vocab_size: int) -> RunRecord:
    """Run requests to their ends on the variant's engine, beginning in its first layout.

    Raises:
        UsageError, RuntimeFailure: as `run_requests`, and if workers die when they change their layout.
    """
    engine, make = variant.engine, variant.make_scheduler
    enter_layout(engine.executor, variant.first)
    executor = _InLayout(engine.executor, variant.first) if variant.first else engine.executor
    return run_requests(executor, make, requests, vocab_size=vocab_size, workers=engine.workers)
