"""WorkersExecutor: runs plans on worker processes, and starts them anew when one dies."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from nanoserve.config import EngineConfig
from nanoserve.errors import RuntimeFailure, WorkersFailed
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.runtime.stage_times import StageTimes
from nanoserve.runtime.workers.capacity import common_num_blocks
from nanoserve.runtime.workers.group import WorkerGroup, WorkersDied, WorkerSettings
from nanoserve.runtime.workers.messages import (
    Allocate,
    Answered,
    Follow,
    FromWorker,
    Hello,
    Loaded,
    Loading,
    Observed,
    Prepare,
    Prepared,
    Ready,
    Run,
)
from nanoserve.scheduler.plan import StepPlan, StepResult

MAX_DEATHS, DEATHS_SECONDS = 3, 60.0
"""So many within such a time of running, and they are not started again.

Starting does not count: with a large model it takes so long that a plan that kills whoever runs it would kill for ever.
"""


class WorkersExecutor:
    """The Executor of several devices: one worker process each, as many plans in flight as pipeline stages.

    When a worker dies, all are ended, `collect` says that everything in flight is lost, and new ones are started;
    plans that are submitted before these are ready wait.

    Args:
        resolved: the model.
        config: with pipeline_parallel x tensor_parallel workers.
        longest: tokens of the longest sequence that the model allows.
        progress: is told how far loading is.
        metadata: "decoupled": plans go to all stages at once, ahead of the hidden states (gLLM, section 3.3);
            "coupled": from stage to stage, with them.
        observe_times: have workers report what they did when, for `take_times`.

    Attributes:
        num_blocks: of the KV cache.
        deaths: how often the workers died and were started again.

    Raises:
        NanoserveError: from the constructor, if the workers cannot start.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        config: EngineConfig,
        *,
        longest: int,
        progress: ProgressCallback | None = None,
        metadata: Literal["decoupled", "coupled"] = "decoupled",
        observe_times: bool = False,
    ) -> None:
        self.max_in_flight = config.pipeline_parallel
        self.feeds_tokens = False
        self.num_blocks = 0
        self.deaths = 0
        self.layers = RemoteLayers(self)
        self._config = config
        self._longest = longest
        self._progress = progress
        self._coupled = metadata == "coupled"
        self._settings = WorkerSettings(resolved, config, coupled=self._coupled, observe_times=observe_times)
        self._in_flight: set[int] = set()
        self._results: deque[StepResult] = deque()
        self._times: list[StageTimes] = []
        self._starting_since: float | None = None
        self._starting_seconds = 0.0
        self._died_at: deque[float] = deque(maxlen=MAX_DEATHS)  # on a clock that stands still while they start
        self._failure: WorkersFailed | None = None
        self._group: WorkerGroup | None = None
        self._begin_life()
        try:
            self._show_start()
            self._wait(lambda: self._running)
        except BaseException as error:
            self.close()
            if isinstance(error, WorkersDied):
                raise error.error or RuntimeFailure(f"{error} while it was starting") from None
            raise
        self._progress = None  # a second start is nobody's to watch

    # ---- plans ------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to the workers, or keep it until they are ready.

        Raises:
            WorkersFailed: if they keep dying.
            RuntimeError: if the executor is closed or as many plans as may be are in flight already.
        """
        self._open_group()
        if len(self._in_flight) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plans may be in flight")
        self._in_flight.add(plan.step)
        if self._running:
            self._send(plan)
        else:
            self._held.append(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """What has become known, in order; waits for something as long as anything is in flight.

        Raises:
            WorkersFailed: if they keep dying.
        """
        self._open_group()
        if not self._in_flight and until is None:
            until = self.now()
        try:
            self._wait(lambda: bool(self._results), until)
        except WorkersDied as death:
            return [self._lost(death)]
        results = list(self._results)
        self._results.clear()
        return results

    def take_times(self) -> list[StageTimes]:
        """What the workers reported of their steps since the last call."""
        times, self._times = self._times, []
        return times

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """End the workers; closing again does nothing, anything else is an error from here on."""
        if self._group is not None:
            self._group.end()
            self._group = None

    def _send(self, plan: StepPlan) -> None:
        group = self._open_group()
        if not self._coupled:
            group.send(Run(plan))
            return
        first = range(self._config.tensor_parallel)
        group.send(Run(plan), first)
        group.send(Follow(), range(len(first), self._config.num_workers))

    # ---- workers ----------------------------------------------------------------------------------------------

    def _begin_life(self) -> None:
        """Start all workers; `_take` follows them until they run."""
        self._introduced: set[int] = set()
        self._loaded: dict[int, Loaded] = {}
        self._ready: set[int] = set()
        self._held: list[StepPlan] = []
        self._prepared: dict[int, bool] = {}
        self._death: WorkersDied | None = None
        self._in_flight.clear()
        self._results.clear()
        self._starting_since = self.now()
        self._group = WorkerGroup(self._settings)

    def _end_of_starting(self) -> None:
        if self._starting_since is not None:
            self._starting_seconds += self.now() - self._starting_since
            self._starting_since = None

    @property
    def _running(self) -> bool:
        return len(self._ready) == self._config.num_workers

    def _lost(self, death: WorkersDied) -> StepResult:
        """Everything in flight is; new workers are started unless that has been tried too often."""
        self._open_group().end()
        self._group = None
        self.deaths += 1
        self._end_of_starting()
        self._died_at.append(self.now() - self._starting_seconds)
        if len(self._died_at) == MAX_DEATHS and self._died_at[-1] - self._died_at[0] < DEATHS_SECONDS:
            times = f"{MAX_DEATHS} times within {self._died_at[-1] - self._died_at[0]:.0f} s"
            self._failure = WorkersFailed(f"the workers died {times}; the last time {death}")
            raise self._failure
        logging.getLogger("nanoserve").warning("nanoserve: %s; all workers are started anew", death)
        try:
            self._begin_life()
        except RuntimeFailure as error:
            self._failure = WorkersFailed(f"{death}, and {error}")
            raise self._failure from None
        return StepResult(None, lost=str(death))

    def _wait(self, known: Callable[[], bool], until: float | None = None) -> None:
        """Take in what the workers say, until that is known or the time is up. Raises WorkersDied."""
        if self._death is not None:
            raise self._death
        while True:
            seconds = None if until is None else max(0.0, until - self.now())
            for message in self._open_group().hear(0.0 if known() else seconds):
                self._take(message)
            if known() or seconds == 0.0:
                return

    def _take(self, message: FromWorker) -> None:
        if isinstance(message, Answered):
            if message.result.step is not None:
                self._in_flight.discard(message.result.step)
            self._results.append(message.result)
        elif isinstance(message, Observed):
            self._times.append(message.times)
        elif isinstance(message, Prepared):
            self._prepared[message.rank] = message.compiled
            self._prepare_next()
        elif isinstance(message, Loading):
            if self._progress is not None and message.rank == 0:
                self._progress(message.stage, message.done, message.total)
        elif isinstance(message, Hello):
            self._introduced.add(message.rank)
            self._allocate()
        elif isinstance(message, Loaded):
            self._loaded[message.rank] = message
            self._allocate()
        elif isinstance(message, Ready):
            self._ready.add(message.rank)
            self._show_start()
            if self._running:
                self._go()

    def _show_start(self) -> None:
        """How many workers run. Long before one of them loads, each imports torch, and nobody shall wonder why."""
        if self._progress is not None:
            self._progress("start workers", len(self._ready), self._config.num_workers)

    def _allocate(self) -> None:
        """Once all have loaded, tell them how large the KV cache is, the same in every life.

        Their first word comes another way, and until it has come nothing can be sent to them.
        """
        if min(len(self._introduced), len(self._loaded)) < self._config.num_workers:
            return
        if not self.num_blocks:
            self.num_blocks = common_num_blocks(list(self._loaded.values()), self._config, self._longest)
        self._open_group().send(Allocate(self.num_blocks))

    def _go(self) -> None:
        """All are ready: send what was held back."""
        self._end_of_starting()
        self._open_group().loading = False
        if self.layers.wanted:
            self._prepare_next()
        held, self._held = self._held, []
        for plan in held:
            self._send(plan)

    def _prepare_next(self) -> None:
        """Have one worker after the other load or compile its layers: the second finds what the first has made."""
        rank = len(self._prepared)
        if rank < self._config.num_workers:
            self._open_group().send(Prepare(), [rank])

    def _wait_for_layers(self) -> None:
        """Until all are prepared, or a worker is dead: that can be said by the next `collect` alone."""
        try:
            self._wait(lambda: not self.layers.pending)
        except WorkersDied as death:
            self._death = death

    def _open_group(self) -> WorkerGroup:
        if self._failure is not None:
            raise self._failure
        if self._group is None:
            raise RuntimeError("the executor is closed")
        return self._group


class RemoteLayers:
    """The compiled layers of all workers together.

    Attributes:
        wanted: whether `start` was called.
    """

    def __init__(self, executor: WorkersExecutor) -> None:
        self.wanted = False
        self._executor = executor

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled."""
        prepared = self._executor._prepared
        return len(prepared) == self._executor._config.num_workers and all(prepared.values())

    @property
    def pending(self) -> bool:
        """Whether some are being compiled."""
        return self.wanted and len(self._executor._prepared) < self._executor._config.num_workers

    def start(self) -> None:
        """Begin to load them, or to compile what is missing."""
        if not self.wanted:
            self.wanted = True
            self._executor._prepare_next()

    def wait(self) -> None:
        """Wait for what has been started, as long as the workers live; between two runs, when no plan is in flight."""
        self._executor._wait_for_layers()
