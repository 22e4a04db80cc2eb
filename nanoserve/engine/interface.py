"""InferenceEngine: everything that callers ask of one engine, or of several that are used as
one."""

from typing import TYPE_CHECKING, Protocol

from nanoserve.record.counters import EngineStatus
from nanoserve.request import FinishReason, Request, SequenceUpdate

if TYPE_CHECKING:
    from nanoserve.engine.engine import Engine


class InferenceEngine(Protocol):
    """An `Engine`, or a `Dispatcher` over several."""

    @property
    def engines(self) -> "tuple[Engine, ...]":
        """Engines by number, for callers that look inside."""

    @property
    def failure(self) -> str | None:
        """Reason why no step can run any more; None while one can."""

    @property
    def losses(self) -> int:
        """Number of times that workers died and new ones were started."""

    @property
    def ready(self) -> bool:
        """Whether a plan would be computed at once; not while workers are stopped or being
        restarted."""

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or anything in flight."""

    @property
    def status(self) -> EngineStatus:
        """Counts and occupancy at this moment."""

    def now(self) -> float:
        """Seconds on the engine's clock."""

    def add(self, request: Request) -> None:
        """Take a request in. Raises UsageError if it can never run."""

    def stop(
        self,
        request_id: str,
        *,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside."""

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Run the loop once, waiting for a result at most to the time ``until``."""

    def close(self) -> None:
        """Close the executors."""
