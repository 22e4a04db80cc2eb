"""Engine: the loop. Schedule, execute, update, output."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from nanoserve.errors import PolicyFailed, RuntimeFailure, UsageError, WorkersFailed
from nanoserve.record.counters import EngineStatus
from nanoserve.record.engine_observer import EngineObserver
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler


class Engine:
    """Drives one executor, which is closed with the engine, with one scheduler."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, vocab_size: int) -> None:
        """``vocab_size`` is the width of the logits: every token id of a request must be below it.
        Raises ValueError if the scheduler would plan rows that the executor does not take."""
        if scheduler.async_scheduling and not executor.async_scheduling:
            raise ValueError("the scheduler plans asynchronously, but the executor does not")
        self.scheduler = scheduler
        self.executor = executor
        self.vocab_size = vocab_size
        # seconds on the engine's clock; a recorded run sets its own
        self.now: Callable[[], float] = executor.now
        self.observers: list[EngineObserver] = []
        # number of times that the executor's workers died and new ones were started
        self.losses = 0
        # reason why the executor runs nothing any more; None while it does
        self.failure: str | None = None

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Schedule, execute, update, output.

        ``until`` is the time at which waiting for a result ends; None waits for one. With nothing
        to do, time passes until then, as workers may die. A step that fails (out of memory, say)
        ends all sequences in flight with an error; the engine goes on. Where no step can run any
        more, all sequences end so, and ``failure`` says why.
        """
        scheduler, updates = self.scheduler, list[SequenceUpdate]()
        try:
            self.submit()
            if scheduler.awaits_results or (until is not None and not scheduler.has_work):
                results = self.executor.collect(until)
                for observer in self.observers:
                    observer.on_results(results)
                for result in results:
                    if result.lost is not None:
                        self.losses += 1
                    updates += scheduler.apply(result, self.now())
        except RuntimeFailure as error:
            return self.fail(error, updates)
        for observer in self.observers:
            observer.on_updates(updates)
        return updates

    def submit(self) -> None:
        """Schedule as many plans as may be in flight, and hand them to the executor.

        Where two may be, the device computes the second while the answers of the first are taken in
        and a third plan is made. Raises RuntimeFailure for `fail`.
        """
        if self.failure is not None:
            raise WorkersFailed(self.failure)
        scheduler, executor = self.scheduler, self.executor
        while scheduler.has_work and scheduler.steps_in_flight < executor.max_in_flight:
            plan = scheduler.schedule(self.now())
            if plan is None:
                return
            executor.submit(plan)
            for observer in self.observers:
                observer.on_submit(plan)

    def fail(
        self, error: RuntimeFailure, updates: SequenceOf[SequenceUpdate] = ()
    ) -> list[SequenceUpdate]:
        """End sequences with an error; returns their updates after those of the step so far.

        After an error of the policy all requests end, but what is in flight is still answered.
        After the end of the workers all end for good, and after any other error what is in flight
        ends.
        """
        if isinstance(error, PolicyFailed):
            failed = self.scheduler.stop_all(str(error), self.now())
        else:
            for observer in self.observers:
                observer.on_failure()
            if isinstance(error, WorkersFailed):
                self.failure = str(error)
                failed = self.scheduler.fail_all(self.failure, self.now())
            else:
                failed = self.scheduler.fail_steps(str(error), self.now())
        known = [*updates, *failed]
        for observer in self.observers:
            observer.on_updates(known)
        return known

    def add(self, request: Request) -> None:
        """Take a request in; it runs from the next step on. Raises UsageError if it can never run,
        or names a token id beyond the vocabulary."""
        self._check_tokens("the prompt", request.prompt)
        self._check_tokens("stop_token_ids", request.params.stop_token_ids)
        self._check_tokens("logit_bias", list(request.params.logit_bias))
        self.scheduler.add(request)
        for observer in self.observers:
            observer.on_request(request)

    def _check_tokens(self, name: str, tokens: SequenceOf[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
            outside = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise UsageError(
                f"{name}: token id {outside} is not in the vocabulary of {self.vocab_size}"
            )

    def stop(
        self,
        request_id: str,
        *,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string seen in
        the text."""
        for observer in self.observers:
            observer.on_stop(request_id, index, reason)
        updates = self.scheduler.stop(request_id, self.now(), index=index, reason=reason)
        for observer in self.observers:
            observer.on_updates(updates)
        return updates

    @property
    def engines(self) -> "tuple[Engine, ...]":
        """This engine, as a `Dispatcher` names several."""
        return (self,)

    @property
    def ready(self) -> bool:
        """Whether a plan would be computed at once; not while workers are stopped or being
        restarted."""
        return self.failure is None and self.executor.ready

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def status(self) -> EngineStatus:
        return EngineStatus.of(self.scheduler, self.losses)

    def close(self) -> None:
        """Close the executor; raises RuntimeFailure if an observer could not finish."""
        try:
            for observer in self.observers:
                observer.on_close()
        finally:
            self.executor.close()
