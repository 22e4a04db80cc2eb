"""LocalExecutor: runs plans in this process, on one device."""

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from nanoserve.config import ModelConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.runtime.compiled_layers import CompiledLayers
from nanoserve.runtime.launched_step import LaunchedStep
from nanoserve.runtime.memory import kv_bytes_per_block, memory_errors
from nanoserve.runtime.model_runner import ModelRunner
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.sizes import format_size
from triton_ops.cpu import CpuOperators, cpu_operators


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that the device works on.

    Attributes:
        problem: what is told if there is no memory for it.
        seconds: that launching it took.
    """

    plan: StepPlan
    problem: str
    step: LaunchedStep
    seconds: float


class LocalExecutor:
    """The Executor of one process with one device: `submit` queues a plan, `collect` runs it.

    With `feeds_tokens`, `submit` hands the plan to the device and returns, and `collect` waits for the older of the two
    that may be in flight: on a GPU the host works while the device computes; the CPU is both, and gains nothing by it.
    With `layers`, the decoder's layers run compiled as soon as they are, else by `run_layer`; `grammars` compiles
    requests' JSON schemas.

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
        layers: CompiledLayers | None = None,
        run_layer: LayerFunction = DecoderLayer.__call__,
        grammars: GrammarCompiler | None = None,
        feeds_tokens: bool = False,
    ) -> None:
        self.feeds_tokens = feeds_tokens
        self.max_in_flight = 2 if feeds_tokens else 1
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
        self._built: list[CpuOperators | CompiledLayers] = [] if layers is None else [layers]
        if self._device.type == "cpu":
            self._built.append(cpu_operators())
        self._plans: deque[StepPlan | _Launched] = deque()

    @property
    def runner(self) -> ModelRunner:
        """What runs the plans, for those who want to time its parts.

        Raises:
            RuntimeError: if the executor is closed.
        """
        return self._open_runner()

    def submit(self, plan: StepPlan) -> None:
        """Take a plan: launch it, or keep it for the next `collect`.

        Raises:
            RuntimeError: if the executor is closed or as many plans as may be are in flight already.
        """
        runner = self._open_runner()
        if len(self._plans) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plan may be in flight")
        self._plans.append(self._launch(runner, plan) if self.feeds_tokens else plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Answer the oldest plan in flight, however long it takes. With none, nothing can become known: sleeps to the
        end of `until`, if one is given."""
        runner = self._open_runner()
        if not self._plans:
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
        return [StepResult(step=launched.plan.step, answers=answers, seconds=seconds)]

    def _launch(self, runner: ModelRunner, plan: StepPlan) -> _Launched:
        for built in self._built:
            built.poll()  # what is ready takes over between two steps
        began = self.now()
        problem = f"a step of {sum(len(row.tokens) for row in plan.rows)} tokens does not fit"
        with self._failing_clearly(problem):
            step = runner.launch(plan)
        return _Launched(plan, problem, step, self.now() - began)

    @contextmanager
    def _failing_clearly(self, problem: str) -> Iterator[None]:
        """A step that finds no memory says so in one line, and nothing in flight will be answered."""
        try:
            with memory_errors(self._device, problem, "lower --max-num-batched-tokens"):
                yield
        except RuntimeFailure:
            self._plans.clear()
            raise

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Give the memory back; closing again does nothing, anything else is an error from here on."""
        self._plans.clear()
        if self._runner is not None:
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
