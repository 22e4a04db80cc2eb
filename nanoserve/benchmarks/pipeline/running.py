"""Requests through an engine whose executor stays, under a scheduler of their own: what came out, when. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from nanoserve.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.measures.workloads import RequestShape, random_prompts
from nanoserve.record.recorder import Telling
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import Executor
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
    """Run requests to their ends under a new scheduler, and record that with what the workers say of it.

    Args:
        executor: with nothing in flight; it is not closed.
        requests: with arrival times from the beginning of the run on, in order.
        workers: how many there are that say what they do; 0 where nobody does.

    Raises:
        UsageError: if a request can never run.
        RuntimeFailure: if one fails, workers die, attention on the CPU is lost, or a worker does not say what it did.
    """
    if isinstance(executor, Telling):
        executor.take_times()  # of what was before
    began = executor.now()
    moved = [replace(request, arrival_time=began + request.arrival_time) for request in requests]
    engine = Engine(make_scheduler(), executor, vocab_size=vocab_size)
    record = record_run(engine, moved)
    record.check()
    wanted, until = workers * sum(bool(plan.rows) for plan in record.plans), executor.now() + _PATIENCE
    while record.count_stage_times() < wanted:  # reports of the last plans may come behind the results
        if executor.now() > until:
            raise RuntimeFailure("the workers did not report what they did for every plan")
        engine.recorder.collect(executor.now() + _LOOK)
    return record
