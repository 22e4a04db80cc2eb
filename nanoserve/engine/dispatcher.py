"""Dispatcher: several whole engines that are used as one (data parallelism)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from nanoserve.engine.engine import Engine
from nanoserve.errors import UsageError, shown
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.request import FinishReason, Request, SequenceUpdate

Router = Callable[[Sequence[int]], int]
"""Chooses the engine of a new request, by number, from the outstanding tokens of each engine (`SequenceTable`)."""
Wait = Callable[[float | None], None]
"""Waits until an executor has a result, at most until a time on their clock; may return sooner."""


def least_tokens(outstanding: Sequence[int]) -> int:
    """A `Router`: the engine with the fewest outstanding tokens; the first of several."""
    return min(range(len(outstanding)), key=outstanding.__getitem__)


class Dispatcher:
    """Several engines of one model, each with its own executor and KV blocks, used like one `Engine`.

    All samples of a request run in one engine. The engines are independent: one whose workers die restarts them, and
    one that has failed for good gets no requests while another lives. Closing it closes them, the first of them last.
    """

    def __init__(self, engines: Sequence[Engine], wait: Wait) -> None:
        self.engines = tuple(engines)  # by number
        self._wait = wait

    @property
    def vocab_size(self) -> int:
        return self.engines[0].vocab_size

    @property
    def losses(self) -> int:
        """How often workers died and new ones were started."""
        return sum(engine.losses for engine in self.engines)

    @property
    def failures(self) -> tuple[str, ...]:
        """The reason of each engine that has failed for good; its requests end with the same message."""
        return tuple(failure for engine in self.engines for failure in engine.failures)

    @property
    def failure(self) -> str | None:
        """Why all engines have failed for good; None while one lives."""
        return self.failures[0] if len(self.failures) == len(self.engines) else None

    @property
    def ready(self) -> bool:
        return all(engine.ready for engine in self._living)

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self.engines)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus.together(engine.status for engine in self.engines)

    def take_steps(self) -> list[RecentStep]:
        return [step for engine in self.engines for step in engine.take_steps()]

    @property
    def _living(self) -> list[Engine]:
        """Engines that have not failed; all if none is left, so that requests fail with their reason."""
        return [engine for engine in self.engines if engine.failure is None] or list(self.engines)

    def now(self) -> float:
        """Seconds on the clock of all executors."""
        return self.engines[0].now()

    def add(self, request: Request) -> None:
        """Give a request to the engine with the fewest tokens outstanding. Raises UsageError if it can never run, names
        a token id beyond the vocabulary, or its id is in use."""
        if any(request.request_id in engine.scheduler.table.requests for engine in self.engines):
            raise UsageError(f"request id {shown(request.request_id)} is in use")
        living = self._living
        living[least_tokens([engine.scheduler.table.outstanding for engine in living])].add(request)

    def stop(
        self, request_id: str, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, in whichever engine it runs."""
        holding = [engine for engine in self.engines if request_id in engine.scheduler.table.requests]
        return [update for engine in holding for update in engine.stop(request_id, index=index, reason=reason)]

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Let every engine submit its plans, then collect the first results; ``until`` is as for an Engine."""
        living = self._living
        if updates := [update for engine in living for update in engine.submit()]:
            return updates
        if any(engine.scheduler.awaits_results for engine in living) or (until is not None and not self.has_work):
            self._wait(until)
        now = self.now()
        return [update for engine in living for update in engine.collect(now)]

    def close(self) -> None:
        """Close all engines, even if closing one of them fails."""
        with ExitStack() as closing:
            for engine in self.engines:
                closing.callback(engine.close)
