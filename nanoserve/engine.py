"""Engine: the loop intake -> schedule -> submit -> collect -> output, and nothing else."""

from nanoserve.errors import RuntimeFailure, UsageError, WorkersFailed
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler


class Engine:
    """Drives one executor with one scheduler.

    Args:
        scheduler: decides.
        executor: runs; it is closed with the engine.
        vocab_size: width of the logits; every token id of a request must be below it.

    Attributes:
        losses: how often the executor's workers died and new ones were started.
        failure: why the executor runs nothing any more; None while it does.

    Raises:
        ValueError: if the scheduler would plan rows that the executor does not take.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, vocab_size: int) -> None:
        if scheduler.feeds_tokens and not executor.feeds_tokens:
            raise ValueError("the scheduler feeds tokens, but the executor does not")
        self.scheduler = scheduler
        self.executor = executor
        self.vocab_size = vocab_size
        self.losses = 0
        self.failure: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def now(self) -> float:
        """Seconds on the executor's clock."""
        return self.executor.now()

    def add(self, request: Request) -> None:
        """Take a request in; it runs from the next step on.

        Raises:
            UsageError: if it can never run, or names a token id beyond the vocabulary.
        """
        params = request.params
        named = (
            ("the prompt", request.prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        )
        for name, tokens in named:
            if outside := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise UsageError(f"{name}: token id {outside[0]} is not in the vocabulary of {self.vocab_size}")
        self.scheduler.add(request)

    def stop(
        self, request_id: str, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string seen in the text."""
        return self.scheduler.stop(request_id, self.now(), index=index, reason=reason)

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Submit as many plans as may be in flight, then take in what has become known.

        Where two may be, the device computes the second while the answers of the first are taken in and a third plan is
        made. A step that fails (out of memory, say) ends all sequences in flight with an error; the engine goes on.
        Where no step can run any more, all sequences end so, and ``failure`` says why.

        Args:
            until: wait for a result at most until this time; None waits for one. With nothing to do, time passes until
                then: workers may die meanwhile, and be started anew.
        """
        updates: list[SequenceUpdate] = []
        try:
            if self.has_work:
                self._submit_plans()
            if self.scheduler.awaits_results or (until is not None and not self.has_work):
                for result in self.executor.collect(until):
                    self.losses += result.lost is not None
                    updates += self.scheduler.apply(result, self.executor.now())
        except WorkersFailed as error:
            self.failure = str(error)
            updates += self.scheduler.fail_all(self.failure, self.executor.now())
        except RuntimeFailure as error:
            updates += self.scheduler.fail_steps(str(error), self.executor.now())
        return updates

    def _submit_plans(self) -> None:
        while self.scheduler.steps_in_flight < self.executor.max_in_flight:
            plan = self.scheduler.schedule(self.executor.now())
            if plan is None:
                return
            self.executor.submit(plan)

    def close(self) -> None:
        """Close the executor."""
        self.executor.close()
