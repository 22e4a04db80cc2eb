"""LocalExecutor: runs plans in this process, on one device."""

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from nanoserve.errors import RuntimeFailure
from nanoserve.executor.mechanism import Mechanism, bound
from nanoserve.executor.stage import Stage
from nanoserve.executor.start.memory import return_freed_memory
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.scheduler.plan import StepPlan, StepResult


class LocalExecutor:
    """The Executor of one process with one device: `submit` queues a plan, `collect` runs it.

    With `async_scheduling`, `submit` launches the plan on the device and returns, and `collect`
    waits for the older of the two that may be in flight: on a GPU the host works while the device
    computes; the CPU is both, and gains nothing by it. `submit` and `collect` raise RuntimeFailure
    when the device has no memory left; what was in flight is then forgotten.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, stage: Stage, *, async_scheduling: bool = False) -> None:
        self.async_scheduling = async_scheduling
        self.max_in_flight = 2 if async_scheduling else 1
        self.ready = True  # this process always is
        self._stage: Stage | None = stage
        self._waiting = bound(stage.mechanisms, Mechanism.wait)
        self._queued = deque[StepPlan]()
        self._launched = deque[PreparedStep]()

    @property
    def stage(self) -> Stage:
        """The device's stage. Raises RuntimeError if the executor is closed."""
        if self._stage is None:
            raise RuntimeError("the executor is closed")
        return self._stage

    @property
    def runner(self) -> ModelRunner:
        return self.stage.runner

    def submit(self, plan: StepPlan) -> None:
        """Take a plan: launch it, or keep it for the next `collect`. One that holds nothing but
        swaps is over at once. Raises RuntimeError if the executor is closed or as many plans as may
        be are in flight already."""
        stage = self.stage
        if plan.host.swaps and not plan.ends:
            self._launch(stage, plan)
            return
        if len(self._queued) + len(self._launched) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plan may be in flight")
        if self.max_in_flight > 1:
            self._launched.append(self._launch(stage, plan))
        else:
            self._queued.append(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Answer the oldest plan in flight, however long it takes. With no plan in flight, wait for
        what is under way beside the steps; with nothing there either, sleep to the end of `until`,
        if one is given."""
        stage = self.stage
        if self._queued:
            self._launched.append(self._launch(stage, self._queued.popleft()))
        if not self._launched:
            return self._wait(until)
        step = self._launched.popleft()
        began = time.monotonic()
        with self._forgetting_failures(stage), stage.memory_errors(step.plan):
            answers = step.answers()
            seconds = step.results.device_seconds
            if seconds is None:  # the host's time is the device's
                seconds = step.launch_seconds + time.monotonic() - began
            result = stage.complete(step, StepResult(step.plan.step, answers, seconds=seconds))
        return [result]

    def _launch(self, stage: Stage, plan: StepPlan) -> PreparedStep:
        """Issue a plan's work: prepare its inputs, compute its layers, sample."""
        stage.poll()
        runner = stage.runner
        if runner.device.type == "cuda":
            # a setting of each thread, and another one may have loaded it
            torch.cuda.set_device(runner.device)
        began = time.monotonic()
        with self._forgetting_failures(stage), stage.memory_errors(plan):
            step = runner.prepare(plan)
            runner.begin(step)
            hidden = runner.compute(step)
            runner.sample(step, hidden)
        step.launch_seconds = time.monotonic() - began
        return step

    def _wait(self, until: float | None) -> list[StepResult]:
        """Wait while no plan is in flight."""
        for wait in self._waiting:
            with self._forgetting_failures(self.stage):
                result = wait(until)
            if result is not None:
                return [result]
        if until is not None:
            time.sleep(max(0.0, until - time.monotonic()))
        return []

    @contextmanager
    def _forgetting_failures(self, stage: Stage) -> Iterator[None]:
        """Forget what is in flight when memory does not suffice: it will not be answered."""
        try:
            yield
        except RuntimeFailure:
            self._queued.clear()
            self._launched.clear()
            stage.abandon()
            raise

    def close(self) -> None:
        """Give the memory back; closing again does nothing, anything else is an error from here
        on."""
        self._queued.clear()
        self._launched.clear()
        self._waiting = ()
        if self._stage is not None:
            device = self._stage.runner.device
            self._stage.close()
            self._stage = None
            gc.collect()
            return_freed_memory()
            if device.type == "cuda":
                # After a kernel's error, or a recording that failed, torch refuses even this: the
                # process has to end, and its error is the first one and not this one.
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()
