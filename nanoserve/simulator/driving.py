"""The loop around an Engine that serves both clocks: requests enter when their time has come, steps follow."""

from collections.abc import Callable, Iterable

from nanoserve.engine import Engine
from nanoserve.request import Request, SequenceUpdate

OnUpdates = Callable[[float, list[SequenceUpdate]], None]
"""Is told what sequences gained, and when."""


def advance(engine: Engine, until: float | None, on_updates: OnUpdates) -> None:
    """Let an engine work until that time on its clock, or until it has nothing to do."""
    while engine.has_work and (until is None or engine.now() < until):
        if updates := engine.step(until):
            on_updates(engine.now(), updates)


def admit(engine: Engine, request: Request) -> None:
    """Give a request to an engine that has worked until it came.

    Raises:
        UsageError: if it can never run.
    """
    while engine.now() < request.arrival_time:
        engine.step(request.arrival_time)  # nothing is in flight: only time passes
    engine.add(request)


def drive(
    engine: Engine,
    requests: Iterable[Request],
    on_updates: OnUpdates,
    on_admission: Callable[[float, Request], None] | None = None,
) -> None:
    """Run requests to their ends.

    Args:
        engine: over an executor with a real or a virtual clock.
        requests: in the order of their arrival times, which are on the executor's clock; taken one at a time.
        on_updates: is told what sequences gained, and when.
        on_admission: is told when the engine takes a request in.

    Raises:
        UsageError: if a request can never run.
    """
    for request in requests:
        advance(engine, request.arrival_time, on_updates)
        admit(engine, request)
        if on_admission is not None:
            on_admission(engine.now(), request)
    advance(engine, None, on_updates)
