"""Dispatcher: several whole engines that look like one. Requests go where the fewest tokens are outstanding."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from nanoserve.engine import Engine, EngineStatus
from nanoserve.errors import UsageError
from nanoserve.request import FinishReason, Request, SequenceUpdate

Router = Callable[[Sequence[int]], int]
"""Chooses the engine of a request that has come, by number; is told the tokens outstanding at each (`TokenCounts`)."""
Wait = Callable[[float | None], None]
"""Waits until an executor has something to say, at most until that time on their clock; may end sooner."""


def least_tokens(outstanding: Sequence[int]) -> int:
    """Where the fewest tokens are outstanding; among equals, the first. A `Router`."""
    return min(range(len(outstanding)), key=outstanding.__getitem__)


class Dispatcher:
    """Several engines of one model, each with its own executor and KV blocks, to be used as one `Engine` is.

    All samples of a request run in one engine. Each engine goes on as it would alone, whatever becomes of the others:
    one whose workers die begins anew, and one that runs nothing any more gets no requests while another lives.

    Args:
        engines: at least one; they are closed with the dispatcher, the first of them last.
        wait: for any of their executors.
    """

    def __init__(self, engines: Sequence[Engine], wait: Wait) -> None:
        self.engines = tuple(engines)  # by number
        self._wait = wait

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.engines[0].vocab_size

    @property
    def losses(self) -> int:
        """How often workers died and new ones were started."""
        return sum(engine.losses for engine in self.engines)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why engines run nothing any more, of each that does not; requests that it had end with just these words."""
        return tuple(failure for engine in self.engines for failure in engine.failures)

    @property
    def failure(self) -> str | None:
        """Why no engine runs anything any more; None while one does."""
        return self.failures[0] if len(self.failures) == len(self.engines) else None

    @property
    def ready(self) -> bool:
        """Whether all engines are that run anything."""
        return all(engine.ready for engine in self._living)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return any(engine.has_work for engine in self.engines)

    @property
    def status(self) -> EngineStatus:
        """How all of them are doing together."""
        return EngineStatus.together(engine.status for engine in self.engines)

    @property
    def _living(self) -> list[Engine]:
        """Those that run something; or all, so that what is asked of them fails with their reason."""
        return [engine for engine in self.engines if engine.failure is None] or list(self.engines)

    def now(self) -> float:
        """Seconds on the clock of all executors."""
        return self.engines[0].now()

    def add(self, request: Request) -> None:
        """Give a request to the engine with the fewest tokens outstanding.

        Raises:
            UsageError: if it can never run, names a token id beyond the vocabulary, or its id is in use.
        """
        if any(request.request_id in engine.tokens for engine in self.engines):
            raise UsageError(f"request id {request.request_id!r} is in use")
        living = self._living
        living[least_tokens([engine.tokens.outstanding for engine in living])].add(request)

    def stop(
        self, request_id: str, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside, wherever it runs."""
        holding = [engine for engine in self.engines if request_id in engine.tokens]
        return [update for engine in holding for update in engine.stop(request_id, index=index, reason=reason)]

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Have every engine submit what may be in flight, then take in what becomes known first.

        Args:
            until: as for an Engine.
        """
        living = self._living
        if updates := [update for engine in living for update in engine.submit()]:
            return updates
        if any(engine.scheduler.awaits_results for engine in living) or (until is not None and not self.has_work):
            self._wait(until)
        now = self.now()
        return [update for engine in living for update in engine.collect(now)]

    def close(self) -> None:
        """Close all engines, even if one of them complains."""
        with ExitStack() as closing:
            for engine in self.engines:
                closing.callback(engine.close)
