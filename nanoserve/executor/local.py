"""LocalExecutor: runs plans in this process, on one device."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import torch

from nanoserve.errors import RuntimeFailure
from nanoserve.executor.kv_transfer.swapping import LocalSwaps
from nanoserve.executor.stage import Stage
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.scheduler.plan import StepPlan, StepResult


class LocalExecutor:
    """The Executor of one process with one device: `submit` queues a plan, `collect` runs it.

    With `feeds_tokens`, `submit` hands the plan to the device and returns, and `collect` waits for the older of the two
    that may be in flight: on a GPU the host works while the device computes; the CPU is both, and gains nothing by it.
    With a part of a host pool in its stage, it carries out swaps beside the computing. `submit` and `collect` raise
    RuntimeFailure when the device has no memory left; what was in flight is then forgotten.
    """

    def __init__(self, stage: Stage, *, feeds_tokens: bool = False) -> None:
        self.feeds_tokens = feeds_tokens
        self.max_in_flight = 2 if feeds_tokens else 1
        self.ready = True  # this process always is
        self._stage: Stage | None = stage
        self._swaps = None if stage.mover is None else LocalSwaps()
        self._plans: deque[StepPlan | PreparedStep] = deque()  # those in flight: queued, or launched
        self._without_host = -1  # host rows of plans up to this step are never answered

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
        """Take a plan: launch it, or keep it for the next `collect`. One that holds nothing but swaps is over at once.
        Raises RuntimeError if the executor is closed or as many plans as may be are in flight already."""
        stage = self.stage
        if plan.swaps and not plan.rows and plan.strategy != "overlap":
            self._launch(stage, plan)
            return
        if len(self._plans) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plan may be in flight")
        self._plans.append(self._launch(stage, plan) if self.feeds_tokens else plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Answer the oldest plan in flight, however long it takes, and the swaps that are done by then. With no plan in
        flight, wait for a swap; with none under way either, sleep to the end of `until`, if one is given."""
        stage = self.stage
        if not self._plans:
            if swapped := self._swapped(stage, until):
                return [StepResult(step=None, swapped=swapped)]
            if until is not None:
                time.sleep(max(0.0, until - self.now()))
            return []
        oldest = self._plans.popleft()
        step = self._launch(stage, oldest) if isinstance(oldest, StepPlan) else oldest
        began = self.now()
        with self._failing_clearly(stage, lambda: _problem(step.plan)):
            answers = step.answers()
        seconds = step.results.device_seconds
        if seconds is None:  # the host's time is the device's
            seconds = step.launch_seconds + self.now() - began - step.draft_seconds
        swapped = self._swapped(stage, began)
        result = StepResult(step.plan.step, answers, swapped=swapped, seconds=seconds, draft_seconds=step.draft_seconds)
        return [result if stage.hybrid is None else self._with_host(stage, result, step.plan)]

    def _with_host(self, stage: Stage, result: StepResult, plan: StepPlan) -> StepResult:
        """The result with progress and loss of host sequences."""
        assert stage.hybrid is not None
        hybrid = stage.hybrid.hybrid
        work, lost = hybrid.take_work(), stage.take_loss()
        if plan.step <= self._without_host:
            on_host = {row.sequence for row in plan.rows if row.tier == "host"}
            answers = tuple(answer for answer in result.answers if answer.sequence not in on_host)
            result = msgspec.structs.replace(result, answers=answers)
        if lost is not None and self._plans:  # host rows of a plan that was launched meanwhile are not waited for
            newest = self._plans[-1]
            self._without_host = (newest.plan if isinstance(newest, PreparedStep) else newest).step
            stage.forget_host()
        return msgspec.structs.replace(result, cohorts=hybrid.progress, host_work=work, host_lost=lost)

    def _swapped(self, stage: Stage, until: float | None) -> tuple[int, ...]:
        """Swaps that are done; waits for one until that time, and not at all if none is under way."""
        if self._swaps is None:
            return ()
        with self._failing_clearly(stage, lambda: "a swap does not fit"):
            return self._swaps.take_done(until)

    def _launch(self, stage: Stage, plan: StepPlan) -> PreparedStep:
        stage.poll()
        if stage.runner.device.type == "cuda":
            torch.cuda.set_device(stage.runner.device)  # a setting of each thread, and another one may have loaded it
        began = self.now()
        with self._failing_clearly(stage, lambda: _problem(plan)):
            step = stage.runner.prepare(plan)
            stage.begin_swaps(step, self._swaps)
            stage.runner.sample(step, stage.runner.compute(step))
        step.launch_seconds = self.now() - began
        return step

    @contextmanager
    def _failing_clearly(self, stage: Stage, problem: Callable[[], str]) -> Iterator[None]:
        """A step that finds no memory says so in one line, and nothing in flight will be answered."""
        try:
            with stage.memory_errors(problem):
                yield
        except RuntimeFailure:
            self._plans.clear()
            if self._swaps is not None:
                self._swaps.abandon()
            stage.forget_host()
            raise

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Give the memory back; closing again does nothing, anything else is an error from here on."""
        self._plans.clear()
        if self._swaps is not None:
            self._swaps.close()
            self._swaps = None
        if self._stage is not None:
            device = self._stage.runner.device
            self._stage.close()
            self._stage = None
            gc.collect()
            if device.type == "cuda":
                # After a kernel's error, or a recording that failed, torch refuses even this: the process has to end,
                # and its error is the first one and not this one.
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()


def _problem(plan: StepPlan) -> str:
    return f"a step of {sum(len(row.tokens) for row in plan.rows)} tokens does not fit"
