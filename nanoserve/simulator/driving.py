"""The loop around an Engine that serves both clocks: requests enter when their time has come, steps follow."""

from collections.abc import Callable, Iterable

from nanoserve.engine import Engine
from nanoserve.request import Request, SequenceUpdate


def drive(
    engine: Engine,
    requests: Iterable[Request],
    on_updates: Callable[[float, list[SequenceUpdate]], None],
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
    coming = iter(requests)
    upcoming = next(coming, None)
    while upcoming is not None or engine.has_work:
        now = engine.now()
        while upcoming is not None and upcoming.arrival_time <= now:
            engine.add(upcoming)
            if on_admission is not None:
                on_admission(now, upcoming)
            upcoming = next(coming, None)
        until = None if upcoming is None else upcoming.arrival_time
        if engine.has_work:
            updates = engine.step(until)
            on_updates(engine.now(), updates)
        elif until is not None:
            engine.executor.collect(until)  # nothing is in flight: only time passes
