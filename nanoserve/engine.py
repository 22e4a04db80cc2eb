"""Engine: the loop intake -> schedule -> submit -> collect -> output, and nothing else."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add

from nanoserve.errors import RuntimeFailure, UsageError, WorkersFailed
from nanoserve.record.recorder import Recorder
from nanoserve.request import FinishReason, Request, SequenceUpdate
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What one engine, or several together, hold at a moment and have done so far."""

    layouts: tuple[int, ...]
    """Number of each engine's current parallel layout."""
    changing: tuple[bool, ...]
    """Whether each engine is leaving its layout: its devices are being emptied, or are changing."""
    running: int
    on_host: int
    waiting: int
    """Sequences that hold KV blocks on the device, in host memory, and that hold none."""
    free_blocks: int
    total_blocks: int
    """KV blocks on the device."""
    free_host_blocks: int
    total_host_blocks: int
    """KV blocks in host memory."""
    prompt_tokens: int
    """Prompt tokens of requests that have their first token."""
    output_tokens: int
    """Tokens sampled for all samples."""
    preemptions: int
    steps: int
    transitions: int
    """Preemptions, steps and changes of the layout so far."""
    losses: int
    """How often workers died and were restarted."""
    host_losses: int
    """How often attention on the CPU was lost, and its sequences computed again."""

    @classmethod
    def together(cls, statuses: Iterable["EngineStatus"]) -> "EngineStatus":
        """Add up the counts, and concatenate the tuples, of at least one engine."""
        return cls(*(reduce(add, column) for column in zip(*map(astuple, statuses), strict=True)))


@dataclass(slots=True)
class _Unended:
    """An unfinished request: its tokens, its unfinished samples, and whether any sample has begun."""

    tokens: int
    samples: int
    answered: bool = False


class TokenCounts:
    """Tokens of an engine's requests."""

    def __init__(self) -> None:
        self.outstanding = 0  # prompts and answers so far of requests that have not ended; their rest is unknown
        self.prompts = 0  # prompt tokens of requests that have their first token
        self.outputs = 0  # all that were sampled
        self._unended: dict[str, _Unended] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._unended

    def on_request(self, request: Request) -> None:
        """A request has come."""
        self._unended[request.request_id] = _Unended(len(request.prompt), request.params.n)
        self.outstanding += len(request.prompt)

    def on_updates(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Count what sequences gained at one moment, each at most once; returns the same updates."""
        unended, sampled = self._unended, 0
        for update in updates:
            request, gained = unended[update.request_id], len(update.new_tokens)
            if gained and not request.answered:
                request.answered = True
                self.prompts += len(update.sequence.request.prompt)
            request.tokens += gained
            sampled += gained
            if update.sequence.finish_reason is not None:
                request.samples -= 1
                if not request.samples:
                    self.outstanding -= request.tokens
                    del unended[update.request_id]
        self.outputs += sampled
        self.outstanding += sampled
        return updates


class Engine:
    """Drives one executor with one scheduler.

    Args:
        scheduler: decides.
        executor: runs; it is closed with the engine.
        vocab_size: width of the logits; every token id of a request must be below it.

    Raises:
        ValueError: if the scheduler would plan rows that the executor does not take.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, vocab_size: int) -> None:
        if scheduler.feeds_tokens and not executor.feeds_tokens:
            raise ValueError("the scheduler feeds tokens, but the executor does not")
        self.scheduler = scheduler
        self.executor = executor
        self.vocab_size = vocab_size
        self.tokens = TokenCounts()  # token counts of this engine's requests
        self.losses = 0  # how often the executor's workers died and new ones were started
        self._recorder = Recorder(scheduler, executor) if scheduler.predictors else None
        self.failure: str | None = None  # why the executor runs nothing any more; None while it does

    @property
    def recorder(self) -> Recorder:
        """What shows this engine to observers. From the first call on it stands before the executor."""
        if self._recorder is None:
            self._recorder = Recorder(self.scheduler, self.executor)
        return self._recorder

    @property
    def _runs(self) -> Executor | Recorder:
        """The executor, or the recorder before it, to which plans go."""
        return self.executor if self._recorder is None else self._recorder

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
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    @property
    def status(self) -> EngineStatus:
        """A snapshot of what the engine holds and has done."""
        scheduler = self.scheduler
        return EngineStatus(
            layouts=(scheduler.layout,),
            changing=(scheduler.layouts.changing,),
            running=len(scheduler.running),
            on_host=len(scheduler.on_host),
            waiting=len(scheduler.waiting),
            free_blocks=scheduler.pool.free_blocks,
            total_blocks=scheduler.pool.num_blocks,
            free_host_blocks=scheduler.host_pool.free_blocks,
            total_host_blocks=scheduler.host_pool.num_blocks,
            prompt_tokens=self.tokens.prompts,
            output_tokens=self.tokens.outputs,
            preemptions=scheduler.preemptions,
            steps=scheduler.steps,
            transitions=scheduler.transitions,
            losses=self.losses,
            host_losses=scheduler.host_losses,
        )

    def now(self) -> float:
        """Seconds on the executor's clock."""
        return self._runs.now()

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
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                outside = next(token for token in tokens if not 0 <= token < self.vocab_size)
                raise UsageError(f"{name}: token id {outside} is not in the vocabulary of {self.vocab_size}")
        self.scheduler.add(request)
        self.tokens.on_request(request)
        if self._recorder is not None:
            self._recorder.on_request(request)

    def stop(
        self, request_id: str, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string seen in the text."""
        if self._recorder is not None:
            self._recorder.on_stop(request_id, index, reason)
        updates = self.scheduler.stop(request_id, self.now(), index=index, reason=reason)
        return self._tell(self.tokens.on_updates(updates))

    def step(self, until: float | None = None) -> list[SequenceUpdate]:
        """Submit as many plans as may be in flight, then take in what has become known.

        Where two may be, the device computes the second while the answers of the first are taken in and a third plan is
        made. A step that fails (out of memory, say) ends all sequences in flight with an error; the engine goes on.
        Where no step can run any more, all sequences end so, and ``failure`` says why.

        Args:
            until: wait for a result at most until this time; None waits for one. With nothing to do, time passes until
                then: workers may die meanwhile, and be restarted.
        """
        return self.submit() or self.collect(until)

    def submit(self) -> list[SequenceUpdate]:
        """The first half of a step; returns what has ended because nothing can be submitted."""
        if self.failure is not None:
            return self._tell(self._fail(WorkersFailed(self.failure)))
        scheduler, runs = self.scheduler, self._runs
        try:
            while scheduler.has_work and scheduler.steps_in_flight < self.executor.max_in_flight:
                plan = scheduler.schedule(runs.now())
                if plan is None:
                    break
                runs.submit(plan)
        except RuntimeFailure as error:
            return self._tell(self._fail(error))
        return []

    def collect(self, until: float | None = None) -> list[SequenceUpdate]:
        """The second half of a step, with its argument."""
        updates: list[SequenceUpdate] = []
        if self.failure is not None:
            return updates
        try:
            if self.scheduler.awaits_results or (until is not None and not self.has_work):
                runs = self._runs
                for result in runs.collect(until):
                    self.losses += result.lost is not None
                    updates += self.tokens.on_updates(self.scheduler.apply(result, runs.now()))
        except RuntimeFailure as error:
            updates += self._fail(error)
        return self._tell(updates)

    def _tell(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Show observers of this engine what sequences gained."""
        if self._recorder is not None:
            self._recorder.on_updates(updates)
        return updates

    def _fail(self, error: RuntimeFailure) -> list[SequenceUpdate]:
        """End what is in flight with an error, or all sequences if the workers are gone."""
        if isinstance(error, WorkersFailed):
            self.failure = str(error)
            return self.tokens.on_updates(self.scheduler.fail_all(self.failure, self.now()))
        return self.tokens.on_updates(self.scheduler.fail_steps(str(error), self.now()))

    def close(self) -> None:
        """Close the executor."""
        self._runs.close()
