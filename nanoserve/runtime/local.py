"""LocalExecutor: runs plans in this process, on one device, one at a time."""

import gc
import time
from collections import deque

import torch

from nanoserve.config import ModelConfig
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.runtime.compiled_layers import CompiledLayers
from nanoserve.runtime.memory import kv_bytes_per_block, memory_errors
from nanoserve.runtime.model_runner import ModelRunner
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.sizes import format_size
from triton_ops.cpu import CpuOperators, cpu_operators


class LocalExecutor:
    """The Executor of one process with one device: `submit` queues a plan, `collect` runs it.

    With `layers`, the decoder's layers run compiled as soon as they are, else by `run_layer`; `grammars` compiles
    requests' JSON schemas.

    Raises:
        RuntimeFailure: from the constructor and from `collect`, when the device has no memory left.
    """

    max_in_flight = 1

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
    ) -> None:
        self._device = torch.device(device)
        size = num_blocks * kv_bytes_per_block(config, block_size, decoder.embedding.weight.dtype)
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
        self._plans: deque[StepPlan] = deque()

    @property
    def runner(self) -> ModelRunner:
        """What runs the plans, for those who want to time its parts.

        Raises:
            RuntimeError: if the executor is closed.
        """
        return self._open_runner()

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; it runs in the next `collect`.

        Raises:
            RuntimeError: if the executor is closed or a plan is waiting already.
        """
        self._open_runner()
        if len(self._plans) >= self.max_in_flight:
            raise RuntimeError(f"at most {self.max_in_flight} plan may be in flight")
        self._plans.append(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        """Run the waiting plan. With none, nothing can become known: sleeps to the end of `until`, if one is given."""
        runner = self._open_runner()
        if not self._plans:
            if until is not None:
                time.sleep(max(0.0, until - self.now()))
            return []
        for built in self._built:
            built.poll()  # what is ready takes over between two steps
        plan = self._plans.popleft()
        began = self.now()
        num_tokens = sum(len(row.tokens) for row in plan.rows)
        with memory_errors(
            self._device, f"a step of {num_tokens} tokens does not fit", "lower --max-num-batched-tokens"
        ):
            answers = runner.execute(plan)
        return [StepResult(step=plan.step, answers=answers, seconds=self.now() - began)]

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        """Give the memory back; closing again does nothing, anything else is an error from here on."""
        self._plans.clear()
        if self._runner is not None:
            self._runner = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the executor is closed")
        return self._runner
