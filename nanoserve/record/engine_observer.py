"""EngineObserver: listens to an engine's loop."""

from collections.abc import Sequence

from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.plan import StepPlan, StepResult


class EngineObserver:
    """Sees what an engine does, in this order, and changes nothing; each method is for a subclass
    to fill in."""

    def on_request(self, request: Request) -> None:
        """The engine has taken a request in."""

    def on_stop(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        """A request is about to be ended from outside, or one of its samples: ``index`` is None for
        all."""

    def on_submit(self, plan: StepPlan) -> None:
        """The executor has taken a plan."""

    def on_results(self, results: Sequence[StepResult]) -> None:
        """The engine has waited for the executor, which gave these results or none; the scheduler
        gets them next."""

    def on_failure(self) -> None:
        """Nothing in flight will be answered."""

    def on_updates(self, updates: Sequence[SequenceUpdate]) -> None:
        """Sequences gained tokens, or ended."""

    def on_close(self) -> None:
        """The engine is about to close its executor. May raise RuntimeFailure."""
