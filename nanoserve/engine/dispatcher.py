"""Dispatcher: several whole engines that are used as one (data parallelism)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure, UsageError, shown
from nanoserve.record.counters import EngineStatus
from nanoserve.request import FinishReason, Request, SequenceUpdate

Router = Callable[[Sequence[int]], int]
"""Chooses the engine of a new request, by number, from the outstanding tokens of each engine
(`SequenceTable`)."""
Wait = Callable[[float | None], None]
"""Waits until an executor has a result, at most until a time on their clock; may return sooner."""


def least_tokens(outstanding: Sequence[int]) -> int:
    """A `Router`: the engine with the fewest outstanding tokens; the first of several."""
    return min(range(len(outstanding)), key=outstanding.__getitem__)


class Dispatcher:
    """Several engines of one model, each with its own executor and KV blocks, used like one
    `Engine`.

    All samples of a request run in one engine. The engines are independent: one whose workers die
    restarts them, and one that has failed for good gets no requests while another lives. Closing it
    closes them, the first of them last.
    """

    def __init__(self, engines: Sequence[Engine], wait: Wait) -> None:
        self.engines = tuple(engines)  # by number
        self._wait = wait

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Let every engine submit its plans, wait for the first results, and take them in;
        ``until`` is as for an Engine."""
        living, updates = self._living, list[SequenceUpdate]()
        for engine in living:
            try:
                engine.submit()
            except RuntimeFailure as error:
                updates += engine.fail(error)
        if updates:
            return updates
        if any(engine.scheduler.awaits_results for engine in living) or (
            until is not None and not self.has_work
        ):
            self._wait(until)
        now = self.now()
        for engine in living:
            updates += engine.step(now)
        return updates

    def add(self, request: Request) -> None:
        """Give a request to the engine with the fewest tokens outstanding. Raises UsageError if it
        can never run, names a token id beyond the vocabulary, or its id is in use."""
        if any(request.request_id in engine.scheduler.table.requests for engine in self.engines):
            raise UsageError(f"request id {shown(request.request_id)} is in use")
        living = self._living
        living[least_tokens([engine.scheduler.table.outstanding for engine in living])].add(request)

    def stop(
        self,
        request_id: str,
        *,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, in whichever engine it runs."""
        holding = [
            engine for engine in self.engines if request_id in engine.scheduler.table.requests
        ]
        return [
            update
            for engine in holding
            for update in engine.stop(request_id, index=index, reason=reason)
        ]

    @property
    def _living(self) -> list[Engine]:
        """Engines that have not failed; all if none is left, so that requests fail with their
        reason."""
        living = [engine for engine in self.engines if engine.failure is None]
        return living or list(self.engines)

    @property
    def failure(self) -> str | None:
        """Why the first engine failed, if all have failed for good; None while one lives."""
        if any(engine.failure is None for engine in self.engines):
            return None
        return self.engines[0].failure

    @property
    def losses(self) -> int:
        """Number of times that workers died and new ones were started."""
        return sum(engine.losses for engine in self.engines)

    @property
    def ready(self) -> bool:
        return all(engine.ready for engine in self._living)

    @property
    def has_work(self) -> bool:
        return any(engine.has_work for engine in self.engines)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus.together(engine.status for engine in self.engines)

    def now(self) -> float:
        """Seconds on the clock of all executors."""
        return self.engines[0].now()

    def close(self) -> None:
        """Close all engines, even if closing one of them fails."""
        with ExitStack() as closing:
            for engine in self.engines:
                closing.callback(engine.close)
