"""WorkersExecutor: runs plans on worker processes, and starts them again when one dies."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import zmq
from msgspec.structs import replace

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.profile import Profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import ModelError, NanoserveError, RuntimeFailure, UsageError, WorkersFailed
from nanoserve.executor.start.memory import CacheSize, choose_cache_size
from nanoserve.executor.workers.group import WATCH_SECONDS, WorkerGroup, WorkersDied
from nanoserve.executor.workers.messages import (
    Allocate,
    Answered,
    Follow,
    ForgetHost,
    FromWorker,
    Hello,
    HostLost,
    Loaded,
    Loading,
    Moved,
    Prepare,
    Prepared,
    Ready,
    RunPlan,
    StepObserved,
    WorkerStart,
)
from nanoserve.executor.workers.outstanding import HostLosses, Moves
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.record.times import Times
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.plan import StepPlan, StepResult


class WorkersExecutor:
    """The Executor of several devices: one worker process each, as many plans in flight as pipeline
    stages.

    When a worker dies, `collect` says that everything in flight is lost. With the next call a new
    one is started, and the others meet it with the weights that they have; where they cannot, all
    are ended and started anew. Plans that are submitted before all are ready wait. How often that
    may go on is up to the caller. Raises NanoserveError, from the constructor or
    `wait_until_ready`, if the workers cannot start.

    Args:
        model: with the cache groups that this engine uses.
        host_blocks: KV blocks in shared memory; with none, nothing can be swapped.
        metadata: "decoupled": plans go to all stages at once, ahead of the hidden states (gLLM,
            section 3.3); "coupled": from stage to stage, with them.
        observe_times: keep what workers did when, for `take_times`.
        profiles: have the first worker find out what policies that attend in host memory predict
            by.
        engine: number of the engine, of ``config.data_parallel``.
        wait: until they are ready; without, `wait_until_ready` is to be called before anything
            else.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        config: EngineConfig,
        *,
        model: ModelConfig,
        host_blocks: int = 0,
        progress: ProgressCallback | None = None,
        metadata: Literal["decoupled", "coupled"] = "decoupled",
        observe_times: bool = False,
        profiles: bool = False,
        engine: int = 0,
        wait: bool = True,
    ) -> None:
        self.max_in_flight = max(layout.pipeline_parallel for layout in config.layouts)
        self.async_scheduling = False
        self.num_workers = config.num_workers
        self.capacities: tuple[LayoutCapacity, ...] = ()  # KV blocks and plans in flight, by layout
        self.state_slots = 0  # for recurrent states
        self.layout = 0  # number of the one that runs, or that new workers begin in
        # what each worker reaches while the others do the same; None where that was not measured.
        self.speeds: MachineSpeeds | None = None
        self.profile: Profile | None = None  # what the first worker has found out
        self.deaths = 0  # how often the workers died and were started again
        self.layers = RemoteLayers([self])
        self._config, self._model, self._host_blocks = config, model, host_blocks
        self.windows = self._model.cache_groups.windows  # of the cache groups
        self._progress = progress
        self._start = WorkerStart(
            model=resolved,
            config=config,
            # each engine takes the GPUs behind those of the one before
            local_rank=engine * config.num_workers,
            coupled=metadata == "coupled",
            observe_times=observe_times,
            profiles=profiles,
        )
        self._times: list[Times] = []
        self._failure: WorkersFailed | None = None
        self._forget_life()
        self._ended_by: WorkersDied | None = None
        self._group: WorkerGroup | None = None
        self._group = self._new_group()
        if wait:
            self.wait_until_ready()

    def _forget_life(self) -> None:
        """Reset to the beginning of a life of the workers, of which none has said anything yet."""
        self._introduced = self._ready = 0  # how many workers said Hello and Ready
        self._loaded: dict[int, Loaded] = {}
        self._held: list[StepPlan] = []
        self._death: WorkersDied | None = None
        self._in_flight: set[int] = set()
        self._results: list[StepResult] = []
        self._moves = Moves(self.num_workers)
        self._host_losses = HostLosses()
        self._asked = -1  # rank of the worker that was asked last to prepare its layers
        # workers that are done with their layers: whether these run compiled
        self.prepared: dict[int, bool] = {}
        self._transitions: dict[int | None, int] = {}  # by step, those that are not answered yet
        self._running_since: float | None = None

    def wait_until_ready(self) -> None:
        """Wait until all workers have started for the first time."""
        try:
            self._show_start()
            self._wait(lambda: self._running)
        except BaseException as error:
            self.close()
            if isinstance(error, WorkersDied):
                raise error.error or RuntimeFailure(f"{error} while it was starting") from None
            raise
        self._progress = None  # a second start is not shown
        self._start = replace(self._start, profiles=False, again=True)

    # ---- plans -----------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Send a plan to the workers, or keep it until they are ready. Raises WorkersFailed if they
        cannot be started again; RuntimeError if the executor is closed or as many plans as may be
        are in flight already."""
        self._open_group()
        if plan.ends:
            if len(self._in_flight) >= self.max_in_flight:
                raise RuntimeError(f"at most {self.max_in_flight} plans may be in flight")
            self._in_flight.add(plan.step)
        self._moves.begin(plan)
        self._host_losses.sent(plan)
        if plan.layouts.transition is not None:
            self._transitions[plan.step] = plan.layouts.transition
        if self._running:
            self._send(plan)
        else:
            self._held.append(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """New results, in order; waits for one as long as anything is in flight. Raises
        WorkersFailed if they cannot be started again."""
        self._open_group()
        if not self._in_flight and not self._moves.swapping and until is None:
            until = self.now()
        try:
            self._wait(lambda: bool(self._results) or self._host_losses.pending, until)
        except WorkersDied as death:
            return [self._lost(death)]
        # behind what was known before; the next plan is sent behind this
        if self._host_losses.pending:
            self._results.append(self._host_losses.tell(self._in_flight))
            self._open_group().send(ForgetHost())
        results, self._results = self._results, []
        for result in results:
            self.layout = self._transitions.pop(result.step, self.layout)
        return results

    def take_times(self) -> list[Times]:
        times, self._times = self._times, []
        return times

    @property
    def failed(self) -> bool:
        """Whether the workers will never run again."""
        return self._failure is not None

    @property
    def ready(self) -> bool:
        """Whether all workers run and give signs of life, so that a plan would be computed at
        once."""
        return self._running and self._group is not None and not self._group.quiet

    @property
    def has_news(self) -> bool:
        """Whether `collect` has something to say without hearing from a worker."""
        return bool(self._results or self._death or self._host_losses.pending)

    @property
    def sources(self) -> "list[zmq.Socket[bytes] | int]":
        """Sockets and descriptors that become readable when `collect` should be called. A death
        replaces them."""
        return [] if self._group is None else self._group.sources

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """End the workers. A later close does nothing, anything else is an error."""
        if self._group is not None:
            self._group.end()
            self._group = None
        self._ended_by = None

    # ---- workers ---------------------------------------------------------------------------------

    def _send(self, plan: StepPlan) -> None:
        group = self._open_group()
        if not self._start.coupled or plan.layouts.transition is not None:
            group.send(RunPlan(plan))
            return
        first = range(self._config.layouts[self.layout].tensor_parallel)
        group.send(RunPlan(plan), first)
        group.send(Follow(), range(len(first), self.num_workers))

    @property
    def _running(self) -> bool:
        return self._ready == self.num_workers

    def _lost(self, death: WorkersDied) -> StepResult:
        """Drop everything in flight; the next call starts new workers, unless that is in vain."""
        group = self._open_group()
        alone = group.bury(death.rank)
        self._group = group if alone else None
        self.deaths += 1
        ran = 0.0 if self._running_since is None else self.now() - self._running_since
        if not ran and isinstance(death.error, ModelError | UsageError):
            # The first ones did not meet it: the model's files are gone, say. The next ones would.
            self._failure = WorkersFailed(
                f"the workers died and cannot be started again: {death.error}"
            )
            raise self._failure
        logging.getLogger("nanoserve").warning(
            "nanoserve: %s; %s restarted", death, "it is" if alone else "all are"
        )
        self._forget_life()
        self._ended_by = death
        return StepResult(None, lost=str(death), ran=ran)

    def _wait(self, known: Callable[[], bool], until: float | None = None) -> None:
        """Take in what the workers say, until that is known or the time is up. Raises
        WorkersDied."""
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
            self._results.append(self._host_losses.answered(message.result))
        elif isinstance(message, HostLost):
            self._host_losses.heard(message)
        elif isinstance(message, StepObserved):
            self._times.append(message.times)
        elif isinstance(message, Moved):
            if self._start.observe_times:
                self._times.append(message.times)
            if (result := self._moves.end_part(message.times)) is not None:
                if result.step is not None:
                    self._in_flight.discard(result.step)
                self._results.append(result)
        elif isinstance(message, Prepared):
            self.prepared[message.rank] = message.compiled
            self.layers.go_on()
        elif isinstance(message, Loading):
            if self._progress is not None and message.rank == 0:
                self._progress(message.stage, message.done, message.total)
        elif isinstance(message, Hello):
            self._introduced += 1
            self._allocate()
        elif isinstance(message, Loaded):
            self._loaded[message.rank] = message
            self._allocate()
        elif isinstance(message, Ready):
            self._ready += 1
            self.profile = message.profile or self.profile
            self._show_start()
            if self._running:
                self._go()

    def _show_start(self) -> None:
        """Show how many workers run: each imports torch long before it loads."""
        if self._progress is not None:
            self._progress("starting workers", self._ready, self.num_workers)

    def _allocate(self) -> None:
        """Once all have loaded, tell them how large the KV cache is, the same in every life.
        Nothing can be sent to a worker before its Hello, which comes another way."""
        if min(self._introduced, len(self._loaded)) < self.num_workers:
            return
        if not self.capacities:
            workers = list(self._loaded.values())
            self.speeds = workers[0].speeds  # which are the same in all of them
            longest, windows = self._model.max_position_embeddings, self.windows
            sizes = [
                common_cache_size(workers, self._config, longest, number, windows)
                for number in range(len(self._config.layouts))
            ]
            self.state_slots = sizes[0].state_slots
            self.capacities = tuple(
                LayoutCapacity(size.num_blocks, layout.pipeline_parallel)
                for size, layout in zip(sizes, self._config.layouts, strict=True)
            )
        self._open_group().send(
            Allocate(tuple(capacity.num_blocks for capacity in self.capacities), self.state_slots)
        )

    def _go(self) -> None:
        """Send the plans that are held back until all workers are ready."""
        self._running_since = self.now()
        self._open_group().end_of_loading()
        self.layers.go_on()
        held, self._held = self._held, []
        for plan in held:
            self._send(plan)

    def prepare_next(self, *, waited: bool) -> None:
        """Have the next worker prepare its layers, unless it does already; for RemoteLayers."""
        # One that is starting would take it for how large its cache is; `_go` comes back to it.
        if self._running and self._asked < len(self.prepared):
            self._asked = len(self.prepared)
            self._open_group().send(Prepare(waited), [self._asked])

    def wait_for(self, known: Callable[[], bool]) -> None:
        """Wait until that holds, or a worker is dead, which the next `collect` alone can say."""
        try:
            self._wait(known)
        except WorkersDied as death:
            self._death = death

    def _new_group(self) -> WorkerGroup:
        return WorkerGroup(
            replace(self._start, layout=self.layout), self._model, self._host_blocks, self._group
        )

    def _open_group(self) -> WorkerGroup:
        """Return the workers, or start new ones if the last workers are dead."""
        if self._failure is not None:
            raise self._failure
        if self._ended_by is not None:
            try:
                self._group = self._new_group()
            # the file that a dummy model has its shape from is gone, say
            except NanoserveError as error:
                self._failure = WorkersFailed(f"{self._ended_by}, and {error}")
                raise self._failure from None
            self._ended_by = None
        if self._group is None:
            raise RuntimeError("the executor is closed")
        return self._group


class RemoteLayers:
    """One worker after the other loads or compiles its layers, executor by executor: the second
    finds what the first has made. All are of one model."""

    def __init__(self, executors: Sequence[WorkersExecutor]) -> None:
        self._executors = executors
        self._wanted = self._waited = False

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled."""
        return all(
            sum(executor.prepared.values()) == executor.num_workers for executor in self._executors
        )

    @property
    def pending(self) -> bool:
        """Whether some are being compiled, or are to be."""
        return self._wanted and self._current() is not None

    def start(self, *, waited: bool = False) -> None:
        """Begin to load them, or to compile what is missing; `waited` as in
        `BackgroundLibrary.start`."""
        self._wanted, self._waited = True, waited
        self.go_on()

    def go_on(self) -> None:
        """Have the next worker begin, if any is to. Call it when a worker is done, and when workers
        run again."""
        if self._wanted and (executor := self._current()) is not None:
            executor.prepare_next(waited=self._waited)

    def wait(self) -> None:
        """Wait for what has been started, as long as the workers live; between two runs, when no
        plan is in flight."""
        for executor in self._executors if self._wanted else ():
            if executor is self._current():
                executor.wait_for(lambda executor=executor: self._current() is not executor)  # type: ignore[misc]

    def _current(self) -> WorkersExecutor | None:
        """The first whose workers have not all prepared their layers, and still can."""
        waiting = (
            one for one in self._executors if not one.failed and len(one.prepared) < one.num_workers
        )
        return next(waiting, None)


def common_cache_size(
    workers: Sequence[Loaded],
    config: EngineConfig,
    longest: int,
    layout: int = 0,
    windows: tuple[int, ...] = (0,),
) -> CacheSize:
    """Size of the KV cache in the parallel layout of that number; `longest` is the model's own
    limit, in tokens, `windows` are those of its cache groups.

    Workers on the CPUs of one machine share its memory; GPUs have their own. Raises UsageError if a
    request of full length does not fit, or more is asked for than is free.
    """
    per_block: defaultdict[str, int] = defaultdict(int)
    per_state: defaultdict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for worker in workers:
        per_block[worker.memory] += worker.block_bytes[layout]
        per_state[worker.memory] += worker.state_bytes
        free[worker.memory] = min(worker.free_bytes, free.get(worker.memory, worker.free_bytes))
    total, per_slot = sum(per_block.values()), sum(per_state.values())
    parts = per_block
    if total == 0:  # a model without attention
        parts = per_state
    whole = sum(parts.values())
    # The memory that holds the fewest blocks is the measure: so much could be free of all together,
    # and be used.
    together = min(free[memory] * whole // parts[memory] for memory in free if parts[memory])
    # the engines beside this one load at the same time, and take as much
    if config.device == "cpu":
        together //= config.data_parallel
    return choose_cache_size(total, per_slot, together, longest, config, windows)


def start_workers(
    resolved: ResolvedModel,
    config: EngineConfig,
    *,
    progress: ProgressCallback | None,
    **settings: Any,
) -> list[WorkersExecutor]:
    """Start the workers of every engine, at the same time; progress is that of the first engine.
    `settings` are others of the WorkersExecutor. Raises NanoserveError if some cannot start; none
    is left then."""
    with ExitStack() as failing:
        executors: list[WorkersExecutor] = []
        for engine in range(config.data_parallel):
            shown = progress if engine == 0 else None
            executors.append(
                WorkersExecutor(
                    resolved, config, progress=shown, engine=engine, wait=False, **settings
                )
            )
            failing.callback(executors[-1].close)
        layers = RemoteLayers(executors)
        for executor in executors:
            executor.wait_until_ready()
            executor.layers = layers
        failing.pop_all()  # their engines close them
    return executors


def wait_for_news(executors: Sequence[WorkersExecutor], until: float | None) -> None:
    """Wait until workers say something, which may be nothing of note, at most until that monotonic
    time and for a second: workers that are silent are noticed then. All executors were asked for
    their news before."""
    if any(executor.has_news for executor in executors):
        return
    seconds = (
        WATCH_SECONDS if until is None else min(WATCH_SECONDS, max(0.0, until - time.monotonic()))
    )
    poller = zmq.Poller()
    for executor in executors:
        for source in executor.sources:
            poller.register(source, zmq.POLLIN)
    poller.poll(math.ceil(1000 * seconds))
