"""The loop around an Engine that serves both clocks: requests enter when their time has come, steps follow."""

from collections.abc import Iterable

from nanoserve.engine import Engine
from nanoserve.request import Request


def advance(engine: Engine, until: float | None) -> None:
    """Let an engine work until that time on its clock, or until it has nothing to do."""
    while engine.has_work and (until is None or engine.now() < until):
        engine.step(until)


def admit(engine: Engine, request: Request) -> None:
    """Give a request to an engine that has worked until it came.

    Raises:
        UsageError: if it can never run.
    """
    while engine.now() < request.arrival_time:
        engine.step(request.arrival_time)  # nothing is in flight: only time passes
    engine.add(request)


def drive(engine: Engine, requests: Iterable[Request]) -> None:
    """Run requests to their ends; whoever wants to know what comes of them observes the engine's recorder.

    Args:
        engine: over an executor with a real or a virtual clock.
        requests: in the order of their arrival times, which are on the executor's clock; taken one at a time.

    Raises:
        UsageError: if a request can never run.
    """
    for request in requests:
        advance(engine, request.arrival_time)
        admit(engine, request)
    advance(engine, None)
