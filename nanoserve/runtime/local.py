"""LocalExecutor: runs plans in this process, on one device."""

import gc
import time
from collections import deque
from collections.abc import Iterator
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
from nanoserve.runtime.host.hybrid_pass import HybridPass
from nanoserve.runtime.launch.memory import kv_bytes_per_block, memory_errors
from nanoserve.runtime.moves.host_pool import HostPool
from nanoserve.runtime.moves.layer_marks import LayerComputed
from nanoserve.runtime.moves.local_swaps import LocalSwaps
from nanoserve.runtime.step.launched_step import LaunchedStep
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.scheduler.plan import StepPlan, StepResult, Swap
from triton_ops.cpu import CpuOperators, cpu_operators


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that the device works on."""

    plan: StepPlan
    problem: str
    """What is told if there is no memory for it."""
    step: LaunchedStep
    seconds: float
    """That launching it took."""


class LocalExecutor:
    """The Executor of one process with one device: `submit` queues a plan, `collect` runs it.

    With `feeds_tokens`, `submit` hands the plan to the device and returns, and `collect` waits for the older of the two
    that may be in flight: on a GPU the host works while the device computes; the CPU is both, and gains nothing by it.
    With `layers`, the decoder's layers run compiled as soon as they are, else by `run_layer`; `grammars` compiles
    requests' JSON schemas. With a `host_pool` it carries out swaps, beside the computing; with a `processor` too, that
    attends for sequences whose KV is there, and `pieces` run the layers in which these take part.

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
            self._runner: ModelRunner | None = ModelRunner(
                decoder,
                num_blocks=num_blocks,
                block_size=block_size,
                device=self._device,
                run_layer=run_layer if layers is None else layers,
                grammars=grammars,
            )
            self._swaps = None if host_pool is None else LocalSwaps(self._runner, host_pool.part(decoder.shard))
        if host_pool is not None and processor is not None:
            part = host_pool.part(decoder.shard)
            self._runner.hybrid = HybridPass(
                decoder,
                lambda: processor.start(decoder.config, part, self._device),
                run_layer=run_layer if layers is None else layers,
                pieces=pieces or LayerRunner(),
            )
        self.processor = processor
        self._built: list[CpuOperators | LayerRunner] = [] if layers is None else [layers]
        if self._device.type == "cpu":
            self._built.append(cpu_operators())
        self._plans: deque[StepPlan | _Launched] = deque()
        self._without_host = -1  # host rows of plans up to this step are never answered

    @property
    def runner(self) -> ModelRunner:
        """What runs the plans, for those who want to time its parts.

        Raises:
            RuntimeError: if the executor is closed.
        """
        return self._open_runner()

    def submit(self, plan: StepPlan) -> None:
        """Take a plan: launch it, or keep it for the next `collect`. One that holds nothing but swaps is over at once.

        Raises:
            RuntimeError: if the executor is closed or as many plans as may be are in flight already.
        """
        runner = self._open_runner()
        if plan.swaps and not plan.rows and plan.strategy != "overlap":
            self._launch(runner, plan)
            return
        if len(self._plans) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plan may be in flight")
        self._plans.append(self._launch(runner, plan) if self.feeds_tokens else plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Answer the oldest plan in flight, however long it takes, and the swaps that are done by then. With no plan in
        flight, wait for a swap; with none under way either, sleep to the end of `until`, if one is given."""
        runner = self._open_runner()
        if not self._plans:
            if swapped := self._swapped(until):
                return [StepResult(step=None, swapped=swapped)]
            if until is not None:
                time.sleep(max(0.0, until - self.now()))
            return []
        oldest = self._plans.popleft()
        launched = self._launch(runner, oldest) if isinstance(oldest, StepPlan) else oldest
        began = self.now()
        with self._failing_clearly(launched.problem):
            answers = launched.step.answers()
        seconds = launched.step.fetching.device_seconds
        if seconds is None:  # the host's time is the device's
            seconds = launched.seconds + self.now() - began
        swapped = self._swapped(began)
        result = StepResult(step=launched.plan.step, answers=answers, swapped=swapped, seconds=seconds)
        return [result if runner.hybrid is None else self._with_host(result, launched.plan, runner.hybrid)]

    def _with_host(self, result: StepResult, plan: StepPlan, hybrid: HybridPass) -> StepResult:
        """The result with what is to be told of host sequences."""
        work, lost = hybrid.take_work(), hybrid.take_loss()
        if plan.step <= self._without_host:
            on_host = {row.sequence for row in plan.rows if row.tier == "host"}
            answers = tuple(answer for answer in result.answers if answer.sequence not in on_host)
            result = msgspec.structs.replace(result, answers=answers)
        if lost is not None and self._plans:  # of one that was launched meanwhile, nobody waits for host rows any more
            newest = self._plans[-1]
            self._without_host = newest.plan.step if isinstance(newest, _Launched) else newest.step
            hybrid.forget()
        return msgspec.structs.replace(result, cohorts=hybrid.progress, host_work=work, host_lost=lost)

    def _swapped(self, until: float | None) -> tuple[int, ...]:
        """Swaps that are done; waits for one at most so long, and not at all if none is under way."""
        if self._swaps is None:
            return ()
        with self._failing_clearly("a swap does not fit"):
            return self._swaps.take_done(until)

    def _launch(self, runner: ModelRunner, plan: StepPlan) -> _Launched:
        for built in self._built:
            built.poll()  # what is ready takes over between two steps
        began = self.now()
        problem = f"a step of {sum(len(row.tokens) for row in plan.rows)} tokens does not fit"
        with self._failing_clearly(problem):
            computed = self._begin(plan.swaps) if plan.swaps else None
            step = runner.launch(plan, computed)
        return _Launched(plan, problem, step, self.now() - began)

    def _begin(self, swaps: tuple[Swap, ...]) -> LayerComputed | None:
        if self._swaps is None:
            raise RuntimeError("this executor has no host pool")
        return self._swaps.begin(swaps)

    @contextmanager
    def _failing_clearly(self, problem: str) -> Iterator[None]:
        """A step that finds no memory says so in one line, and nothing in flight will be answered."""
        try:
            with memory_errors(self._device, problem, "lower --max-num-batched-tokens"):
                yield
        except RuntimeFailure:
            self._plans.clear()
            if self._swaps is not None:
                self._swaps.abandon()
            if self._runner is not None and self._runner.hybrid is not None:
                self._runner.hybrid.forget()
            raise

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Give the memory back; closing again does nothing, anything else is an error from here on."""
        self._plans.clear()
        if self._swaps is not None:
            self._swaps.close()
            self._swaps = None
        if self._runner is not None:
            if self._runner.hybrid is not None:
                self._runner.hybrid.close()
            if self.processor is not None:
                self.processor.close()
            self._runner = None
            gc.collect()
            if self._device.type == "cuda":
                # After a kernel's error, or a recording that failed, torch refuses even this: the process has to end,
                # and what it ends with is the first error and not this one.
                with suppress(RuntimeError):
                    torch.cuda.empty_cache()

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        return self._runner
