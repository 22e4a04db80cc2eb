"""LocalExecutor: runs plans in this process, on one device."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec
import torch

from nanoserve.config import ModelConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.processes.sizes import format_size
from nanoserve.runtime.compile.layer_runner import LayerRunner
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.launch.memory import kv_bytes_per_block, memory_errors
from nanoserve.runtime.moves.host_pool import HostPool
from nanoserve.runtime.moves.swapping import LocalSwaps
from nanoserve.runtime.stage import Stage
from nanoserve.runtime.step.launched_step import LaunchedStep
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.scheduler.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that the device works on."""

    plan: StepPlan
    step: LaunchedStep
    seconds: float
    """How long launching it took."""


class LocalExecutor:
    """The Executor of one process with one device: `submit` queues a plan, `collect` runs it.

    With `feeds_tokens`, `submit` hands the plan to the device and returns, and `collect` waits for the older of the two
    that may be in flight: on a GPU the host works while the device computes; the CPU is both, and gains nothing by it.
    With a `host_pool` it carries out swaps, beside the computing; with a `processor` too, that attends for sequences
    whose KV is there. Other arguments are those of `Stage.build`.

    Raises:
        RuntimeFailure: from the constructor, `submit` and `collect`, when the device has no memory left. What was in
            flight is then forgotten.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        layers: LayerRunner | None = None,
        run_layer: LayerFunction = DecoderLayer.__call__,
        grammars: GrammarCompiler | None = None,
        feeds_tokens: bool = False,
        host_pool: HostPool | None = None,
        processor: HostProcessor | None = None,
        pieces: LayerRunner | None = None,
    ) -> None:
        self.feeds_tokens = feeds_tokens
        self.max_in_flight = 2 if feeds_tokens else 1
        self.ready = True  # this process always is
        self._device = torch.device(device)
        size = num_blocks * kv_bytes_per_block(config, block_size, decoder.dtype)
        decoder.eval()
        with memory_errors(self._device, f"a KV cache of {format_size(size)} does not fit", "lower --kv-cache-memory"):
            self._stage: Stage | None = Stage.build(
                decoder,
                num_blocks=num_blocks,
                block_size=block_size,
                device=self._device,
                layers=layers,
                run_layer=run_layer,
                pieces=pieces,
                grammars=grammars,
                part=None if host_pool is None else host_pool.part(decoder.shard),
                processor=processor,
            )
        self._swaps = None if host_pool is None else LocalSwaps()
        self.processor = processor
        self._plans: deque[StepPlan | _Launched] = deque()
        self._without_host = -1  # host rows of plans up to this step are never answered

    @property
    def runner(self) -> ModelRunner:
        """What runs the plans, to time its parts.

        Raises:
            RuntimeError: if the executor is closed.
        """
        return self._open_stage().runner

    def submit(self, plan: StepPlan) -> None:
        """Take a plan: launch it, or keep it for the next `collect`. One that holds nothing but swaps is over at once.

        Raises:
            RuntimeError: if the executor is closed or as many plans as may be are in flight already.
        """
        stage = self._open_stage()
        if plan.swaps and not plan.rows and plan.strategy != "overlap":
            self._launch(stage, plan)
            return
        if len(self._plans) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plan may be in flight")
        self._plans.append(self._launch(stage, plan) if self.feeds_tokens else plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Answer the oldest plan in flight, however long it takes, and the swaps that are done by then. With no plan in
        flight, wait for a swap; with none under way either, sleep to the end of `until`, if one is given."""
        stage = self._open_stage()
        if not self._plans:
            if swapped := self._swapped(stage, until):
                return [StepResult(step=None, swapped=swapped)]
            if until is not None:
                time.sleep(max(0.0, until - self.now()))
            return []
        oldest = self._plans.popleft()
        launched = self._launch(stage, oldest) if isinstance(oldest, StepPlan) else oldest
        began = self.now()
        with self._failing_clearly(stage, lambda: _problem(launched.plan)):
            answers = launched.step.answers()
        seconds = launched.step.results.device_seconds
        if seconds is None:  # the host's time is the device's
            seconds = launched.seconds + self.now() - began
        swapped = self._swapped(stage, began)
        result = StepResult(step=launched.plan.step, answers=answers, swapped=swapped, seconds=seconds)
        return [result if stage.hybrid is None else self._with_host(stage, result, launched.plan)]

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
            self._without_host = newest.plan.step if isinstance(newest, _Launched) else newest.step
            stage.forget_host()
        return msgspec.structs.replace(result, cohorts=hybrid.progress, host_work=work, host_lost=lost)

    def _swapped(self, stage: Stage, until: float | None) -> tuple[int, ...]:
        """Swaps that are done; waits for one until that time, and not at all if none is under way."""
        if self._swaps is None:
            return ()
        with self._failing_clearly(stage, lambda: "a swap does not fit"):
            return self._swaps.take_done(until)

    def _launch(self, stage: Stage, plan: StepPlan) -> _Launched:
        stage.poll()
        began = self.now()
        with self._failing_clearly(stage, lambda: _problem(plan)):
            step = stage.runner.prepare(plan)
            stage.begin_swaps(step, self._swaps)
            launched = stage.runner.sample(step, stage.runner.compute(step))
        return _Launched(plan, launched, self.now() - began)

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
            self._stage.close()
            if self.processor is not None:
                self.processor.close()
            self._stage = None
            gc.collect()
            if self._device.type == "cuda":
                # After a kernel's error, or a recording that failed, torch refuses even this: the process has to end,
                # and its error is the first one and not this one.
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def _open_stage(self) -> Stage:
        if self._stage is None:
            raise RuntimeError("the executor is closed")
        return self._stage


def _problem(plan: StepPlan) -> str:
    return f"a step of {sum(len(row.tokens) for row in plan.rows)} tokens does not fit"
