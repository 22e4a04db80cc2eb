"""A worker's loop: a plan, the hidden states of the stage before, its layers, on to the stage
behind or an answer."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec
import torch
import zmq
from torch import Tensor

from nanoserve.errors import NanoserveError
from nanoserve.executor.mechanism import Mechanism, bound
from nanoserve.executor.stage import Stage
from nanoserve.executor.step.model_runner import PreparedStep
from nanoserve.executor.workers.distributed import Activations, Expected
from nanoserve.executor.workers.endpoint import WorkerEndpoint
from nanoserve.executor.workers.messages import (
    Answered,
    Follow,
    ForgetHost,
    HostLost,
    Moved,
    Prepare,
    Prepared,
    Rejoin,
    RunPlan,
    StepObserved,
    ToWorker,
    WorkerFailed,
    WorkerStart,
    worker_decoder,
)
from nanoserve.models.resharding import ReshardableWeights
from nanoserve.models.shards import Shard
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.scheduler.plan import StepPlan, StepResult

THREAD_NAME = "prefetch"

_STEPS = 2  # the step that is computed, and the one prepared ahead of it


@dataclass(frozen=True, slots=True)
class PrefetchedStep:
    """A plan that is ready to be computed."""

    step: PreparedStep
    intermediate_hidden_states: Expected | None
    """Hidden states from the stage before, being received; None where none come."""
    received: float
    prepared: float
    """When the plan came and when its inputs were ready, in seconds of the monotonic clock."""


class PrefetchThread:
    """A thread between the engine's socket, which it alone uses from now on, and the worker's loop.

    It calls `prepare` with a plan and the time at which it came, one step ahead of the loop; None
    leaves plans to the loop, as changes of layout always are.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        prepare: Callable[[StepPlan, float], PrefetchedStep] | None,
        device: torch.device,
    ) -> None:
        self._socket = socket
        self._device = device
        self._prepare = prepare
        self._arrived: SimpleQueue[PrefetchedStep | ToWorker | BaseException] = SimpleQueue()
        self._places = threading.Semaphore(_STEPS)
        threading.Thread(target=self._receive, name=THREAD_NAME, daemon=True).start()

    def next(self, seconds: float | None) -> PrefetchedStep | ToWorker | None:
        """Wait for the next arrival for `seconds`, or without limit. Raises what preparing it
        raised."""
        try:
            arrived = self._arrived.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived

    def fail(self, error: BaseException) -> None:
        """Have the loop raise the error of another thread."""
        self._arrived.put(error)

    def done(self) -> None:
        """Free the buffers of a step that the loop has ended."""
        self._places.release()

    def rejoin(self) -> WorkerStart:
        """Drop what comes until the engine calls the workers together anew: how they begin. The
        socket is free then."""
        while not isinstance(arrived := self._arrived.get(), Rejoin):
            self._places.release()
        return arrived.start

    def _receive(self) -> None:
        decoder = worker_decoder()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a setting of each thread
        try:
            while True:
                message = decoder.decode(self._socket.recv())
                if (
                    isinstance(message, RunPlan)
                    and self._prepare is not None
                    and message.plan.layouts.transition is None
                ):
                    received = time.monotonic()
                    self._places.acquire()
                    try:
                        self._arrived.put(self._prepare(message.plan, received))
                    except Exception as error:
                        self._arrived.put(error)
                elif isinstance(message, ForgetHost):
                    # Preparing the next plan may forget sequences of which the steps before this
                    # have still to answer.
                    for _ in range(_STEPS):
                        self._places.acquire()
                    self._arrived.put(message)
                    self._places.release(_STEPS)
                else:
                    self._arrived.put(message)
                    if isinstance(message, Rejoin):
                        return
        except BaseException as error:  # the loop reports it
            self._arrived.put(error)


# how often to look, with nothing else to do, whether something has been built
_BUILDING_SECONDS = 0.5


class WorkerLayout:
    """A worker's part in one parallel layout."""

    def __init__(self, shard: Shard, stage: Stage, activations: Activations) -> None:
        self.shard, self.stage, self.activations = shard, stage, activations
        self._expecting = bound(stage.mechanisms, Mechanism.expect)
        self._sending = bound(stage.mechanisms, Mechanism.send)
        self._reporting = bound(stage.mechanisms, Mechanism.report)

    def expect(self, step: PreparedStep) -> Expected | None:
        """Begin to receive the hidden states of a step; None where none come. If the plan does not
        say how many come, this waits until the stage before says so."""
        num_tokens = step.num_tokens
        for expect in self._expecting:
            num_tokens += expect(step, self.activations)
        return self.activations.expect(num_tokens)

    def send(self, step: PreparedStep, hidden: Tensor | None) -> None:
        """Send what was computed of a step to the next stage."""
        for send in self._sending:
            if send(step, hidden, self.activations):
                return
        if hidden is not None:
            self.activations.send(hidden)

    def report(self) -> None:
        """Report what the mechanisms have to tell at the end of a step."""
        for report in self._reporting:
            report()


class Worker:
    """Runs plans in the order in which they come.

    A plan begins when its turn comes, and what its mechanisms do beside the computing does not
    begin sooner: the plan before may copy from a block that is free already, and a swap may fill
    that block.

    `weights` are those of all layouts; None where there is one.
    """

    def __init__(
        self,
        start: WorkerStart,
        endpoint: WorkerEndpoint,
        layouts: Sequence[WorkerLayout],
        weights: ReshardableWeights | None,
    ) -> None:
        self._endpoint = endpoint
        self._layouts, self._weights = layouts, weights
        self._current = layouts[start.layout]
        self._stages = [layout.stage for layout in layouts]
        self._observe_times = start.observe_times
        self._preparing = False
        self._forgotten = 0  # how many ForgetHost it has followed
        device = self._current.stage.runner.device
        self._prefetch = PrefetchThread(
            endpoint.plans, None if start.coupled else self._prepare, device
        )
        for stage in self._stages:
            for mechanism in stage.mechanisms:
                mechanism.connect(self)
        self._plan_decoder = msgspec.msgpack.Decoder(StepPlan)

    @property
    def rank(self) -> int:
        """Its number among the workers."""
        return self._current.shard.worker

    def run(self) -> WorkerStart:
        """Serve until another worker is lost, and all others are to meet a new one: how they begin.
        Raises RuntimeFailure if memory runs out; hidden states that other workers wait for are then
        missing."""
        try:
            return self._serve()
        except NanoserveError:
            raise
        # of this worker, or because another is lost: the engine knows, and may end this one
        except Exception as error:
            self._endpoint.report(WorkerFailed.of(self.rank, error))
        return self._prefetch.rejoin()

    def _serve(self) -> WorkerStart:
        while True:
            free = time.monotonic()
            message = self._prefetch.next(_BUILDING_SECONDS if self._preparing else None)
            for stage in self._stages:
                stage.poll()
            self._tell_prepared()
            if isinstance(message, PrefetchedStep):
                self._take(message, max(free, message.received))
            elif isinstance(message, RunPlan) and message.plan.layouts.transition is not None:
                self._reshard(message.plan.step, message.plan.layouts.transition)
            elif isinstance(message, RunPlan):
                self._take_coupled(message.plan)
            elif isinstance(message, Follow):
                self._take_coupled(
                    self._plan_decoder.decode(self._current.activations.receive_plan())
                )
            # host sequences under way were lost, here or in another stage
            elif isinstance(message, ForgetHost):
                self._forgotten += 1
                self._current.stage.abandon()
            elif isinstance(message, Rejoin):
                return message.start
            elif isinstance(message, Prepare):
                for stage in self._stages:
                    stage.start(waited=message.waited)
                self._preparing = True
                self._tell_prepared()

    def _prepare(self, plan: StepPlan, received: float) -> PrefetchedStep:
        """The host's part of a step, and a place for its hidden states."""
        step = self._current.stage.runner.prepare(plan)
        prepared = time.monotonic()
        return PrefetchedStep(step, self._current.expect(step), received, prepared)

    def _take(self, turn: PrefetchedStep, began: float) -> None:
        stage, step = self._current.stage, turn.step
        with stage.memory_errors(step.plan):
            stage.runner.begin(step)
            intermediate_hidden_states, arrived = None, began
            if turn.intermediate_hidden_states is not None:
                intermediate_hidden_states = turn.intermediate_hidden_states.wait()
                arrived = time.monotonic()
            computed, result = self._compute(turn, intermediate_hidden_states)
        self._prefetch.done()
        self._current.report()
        if not step.plan.ends:
            return  # a plan of swaps is answered by these alone
        if self._observe_times:
            times = StageTimes(
                step=step.plan.step,
                rank=self.rank,
                tokens=step.num_tokens,
                received=turn.received,
                prepared=turn.prepared,
                began=began,
                arrived=arrived,
                computed=computed,
                sent=time.monotonic(),
            )
            self._endpoint.report(StepObserved(times))
        if result is not None:  # behind the times: with its last answer the engine may end
            self._endpoint.report(Answered(result))

    def _compute(
        self, turn: PrefetchedStep, intermediate_hidden_states: Tensor | None
    ) -> tuple[float, StepResult | None]:
        """Run its layers, and pass on or sample what comes of it; when the device was done, and
        what to answer."""
        shard, stage, step = self._current.shard, self._current.stage, turn.step
        hidden = stage.runner.compute(step, intermediate_hidden_states)
        if not shard.is_last:
            computed = time.monotonic()
            self._current.send(step, hidden)
            return computed, None
        answers = stage.runner.sample(step, hidden).answers()
        computed = time.monotonic()
        if not shard.answers:
            return computed, None
        result = StepResult(step.plan.step, answers, seconds=computed - turn.received)
        return computed, stage.complete(step, result)

    def _take_coupled(self, plan: StepPlan) -> None:
        """Run a plan that comes with its hidden states: pass it on, then prepare its inputs."""
        received = time.monotonic()
        if not self._current.shard.is_last:
            self._current.activations.send_plan(msgspec.msgpack.encode(plan))
        self._take(self._prepare(plan, received), received)

    # ---- what mechanisms tell --------------------------------------------------------------------

    def report_moved(self, times: SwapTimes) -> None:
        """Report a swap that is done; any thread may."""
        self._endpoint.report(Moved(times))

    def report_loss(self, reason: str) -> None:
        """Report that the CPU will not end what was under way here."""
        self._endpoint.report(HostLost(self.rank, reason, self._forgotten))

    def fail(self, error: BaseException) -> None:
        """Have the loop raise the error of another thread."""
        self._prefetch.fail(error)

    # ---- what moves ------------------------------------------------------------------------------

    def _reshard(self, step: int, layout: int) -> None:
        """Change the layout, with nothing in flight: exchange the parameters."""
        assert self._weights is not None, "no change of layout where there is one"
        began = time.monotonic()
        self._current.stage.forget()
        num_bytes = self._weights.fill(layout)
        self._current = self._layouts[layout]
        times = ReshardTimes(step, self.rank, layout, num_bytes, began, time.monotonic())
        self._endpoint.report(Moved(times))

    def _tell_prepared(self) -> None:
        """Report once that nothing is being built any more."""
        if self._preparing and not any(stage.pending for stage in self._stages):
            self._preparing = False
            compiled = all(stage.compiled for stage in self._stages)
            self._endpoint.report(Prepared(self.rank, compiled))
