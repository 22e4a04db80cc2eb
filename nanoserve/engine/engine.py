"""Engine: the loop intake -> schedule -> submit -> collect -> output, and nothing else."""

from collections.abc import Sequence as SequenceOf

from nanoserve.errors import PolicyFailed, RuntimeFailure, UsageError, WorkersFailed
from nanoserve.record.counters import EngineStatus, RecentStep
from nanoserve.record.forecasts import Forecasts
from nanoserve.record.recorder import Recorder
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler


class Engine:
    """Drives one executor, which is closed with the engine, with one scheduler."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, vocab_size: int) -> None:
        """``vocab_size`` is the width of the logits: every token id of a request must be below it. Raises ValueError if
        the scheduler would plan rows that the executor does not take."""
        if scheduler.feeds_tokens and not executor.feeds_tokens:
            raise ValueError("the scheduler feeds tokens, but the executor does not")
        self.scheduler = scheduler
        self.executor = executor
        self.vocab_size = vocab_size
        self.recorder = Recorder(scheduler, executor)  # counts, and shows this engine to observers
        self.forecasts = Forecasts(scheduler.predictors, self.recorder.emit)  # what predictors learn through
        if scheduler.predictors:
            scheduler.observers.append(self.forecasts)
        self.failure: str | None = None  # why the executor runs nothing any more; None while it does

    @property
    def losses(self) -> int:
        """How often the executor's workers died and new ones were started."""
        return self.recorder.losses

    @property
    def failures(self) -> tuple[str, ...]:
        """`failure`, if there is one, as of several engines."""
        return () if self.failure is None else (self.failure,)

    @property
    def ready(self) -> bool:
        """Whether a plan would be computed at once; not while workers are stopped or being restarted."""
        return self.failure is None and self.executor.ready

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def status(self) -> EngineStatus:
        return self.recorder.status

    def take_steps(self) -> list[RecentStep]:
        """The steps that have ended since the last call, at most the last `RECENT_STEPS`."""
        return self.recorder.take_steps()

    def now(self) -> float:
        """Seconds on the executor's clock."""
        return self.recorder.now()

    def add(self, request: Request) -> None:
        """Take a request in; it runs from the next step on. Raises UsageError if it can never run, or names a token id
        beyond the vocabulary."""
        stop_tokens, bias = request.params.stop_token_ids, request.params.logit_bias
        for name, tokens in (("the prompt", request.prompt), ("stop_token_ids", stop_tokens), ("logit_bias", bias)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                outside = next(token for token in tokens if not 0 <= token < self.vocab_size)
                raise UsageError(f"{name}: token id {outside} is not in the vocabulary of {self.vocab_size}")
        self.scheduler.add(request)
        self.recorder.on_request(request)

    def stop(
        self, request_id: str, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string seen in the text."""
        self.recorder.on_stop(request_id, index, reason)
        updates = self.scheduler.stop(request_id, self.now(), index=index, reason=reason)
        self.recorder.on_updates(updates)
        return updates

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Submit as many plans as may be in flight, then take in what has become known.

        Where two may be, the device computes the second while the answers of the first are taken in and a third plan is
        made. A step that fails (out of memory, say) ends all sequences in flight with an error; the engine goes on.
        Where no step can run any more, all sequences end so, and ``failure`` says why. ``until`` is the time at which
        waiting for a result ends; None waits for one. With nothing to do, time passes until then, as workers may die.
        """
        return self.submit() or self.collect(until)

    def submit(self) -> list[SequenceUpdate]:
        """The first half of a step; returns what has ended because nothing can be submitted."""
        if self.failure is not None:
            return self._fail(WorkersFailed(self.failure))
        scheduler, recorder = self.scheduler, self.recorder
        try:
            while scheduler.has_work and scheduler.steps_in_flight < self.executor.max_in_flight:
                plan = scheduler.schedule(recorder.now())
                if plan is None:
                    break
                recorder.submit(plan)
        except RuntimeFailure as error:
            return self._fail(error)
        return []

    def collect(self, until: float | None = None) -> list[SequenceUpdate]:
        """The second half of a step, with its argument."""
        updates: list[SequenceUpdate] = []
        if self.failure is not None:
            return updates
        recorder = self.recorder
        try:
            if self.scheduler.awaits_results or (until is not None and not self.has_work):
                for result in recorder.collect(until):
                    updates += self.scheduler.apply(result, recorder.now())
        except RuntimeFailure as error:
            return self._fail(error, updates)
        recorder.on_updates(updates)
        return updates

    def _fail(self, error: RuntimeFailure, updates: SequenceOf[SequenceUpdate] = ()) -> list[SequenceUpdate]:
        """End what is in flight with an error, or all sequences if the workers are gone; ``updates`` came before. All
        end too if the policy failed, but what is in flight is still answered then, and the engine goes on."""
        if isinstance(error, PolicyFailed):
            failed = self.scheduler.stop_all(str(error), self.now())
        elif isinstance(error, WorkersFailed):
            self.failure = str(error)
            failed = self.scheduler.fail_all(self.failure, self.now())
        else:
            failed = self.scheduler.fail_steps(str(error), self.now())
        self.recorder.on_updates(known := [*updates, *failed])
        return known

    def close(self) -> None:
        self.recorder.close()
