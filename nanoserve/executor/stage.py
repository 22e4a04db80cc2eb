"""One device's part of a model at work: the steps that an executor of this process and a worker
both take with a plan.

Each polls what has been built, prepares, begins and computes the step. Queueing and collecting are
a LocalExecutor's, activations and resharding a Worker's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.mechanism import Mechanism, bound
from nanoserve.executor.start.memory import keep_freed_memory, kv_bytes_per_block, memory_errors
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.utils.sizes import format_size
from triton_ops.cpu import BackgroundLibrary, cpu_operators


def compiled_layers(decoder: Decoder, config: EngineConfig) -> LayerRunner | None:
    """The layers of a stage on a CPU, compiled ahead of time; None if all is to run eagerly.
    Compiled layers may round otherwise for another number of rows."""
    if config.eager or config.batch_invariant:
        return None
    return LayerRunner.ahead_of_time(
        decoder,
        block_size=config.block_size,
        operators=cpu_operators(),
        with_pieces=config.attends_on_host,
    )


class Stage:
    """A runner, the mechanisms that are attached to it, and what is built in the background to make
    it faster."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        layers: LayerRunner | None = None,
        mechanisms: Sequence[Mechanism] = (),
        batch_invariant: bool = False,
    ) -> None:
        self.runner, self.layers, self.mechanisms = runner, layers, mechanisms
        self._batch_invariant = batch_invariant
        self._completing = bound(mechanisms, Mechanism.complete)
        self._libraries = list[BackgroundLibrary]()
        if runner.device.type == "cpu":
            keep_freed_memory()
            self._libraries.append(cpu_operators())
        if layers is not None:
            self._libraries.extend(layers.libraries)
        self._unloaded = self._libraries

    @classmethod
    def build(
        cls,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        layers: LayerRunner | None = None,
        mechanisms: Sequence[Mechanism] = (),
        batch_invariant: bool = False,
        **settings: Any,
    ) -> "Stage":
        """The stage of a decoder, with its KV cache. Raises RuntimeFailure if memory does not
        suffice, UsageError for a dtype whose answers cannot be `batch_invariant`.

        Without `layers` plain torch runs them. `settings` are others of the ModelRunner.
        """
        device = torch.device(device)
        size = format_size(
            num_blocks * kv_bytes_per_block(decoder.config, block_size, decoder.dtype)
        )
        decoder.eval()
        if batch_invariant and decoder.dtype == torch.float32:
            raise UsageError(
                "--batch-invariant is for 16 bits: choose --dtype bfloat16, or leave it out"
            )
        if batch_invariant and not cpu_operators().wait():
            raise RuntimeFailure(
                f"--batch-invariant needs the C++ operators ({cpu_operators().problem}); leave it "
                "out"
            )
        with memory_errors(device, f"a KV cache of {size} does not fit", "lower --kv-cache-memory"):
            runner = ModelRunner(
                decoder,
                num_blocks=num_blocks,
                block_size=block_size,
                device=device,
                run_layer=layers or DecoderLayer.__call__,
                mechanisms=mechanisms,
                **settings,
            )
            return cls(
                runner, layers=layers, mechanisms=mechanisms, batch_invariant=batch_invariant
            )

    # ---- with each plan --------------------------------------------------------------------------

    def poll(self) -> None:
        """Load what has been built meanwhile: it takes over between two steps."""
        # one setting for all stages of the process
        if self.runner.device.type == "cpu" and cpu_operators().loaded:
            torch.ops.nanoserve.set_batch_invariant(self._batch_invariant)
        if self._unloaded:
            for library in self._unloaded:
                library.poll()
            self._unloaded = [library for library in self._unloaded if not library.loaded]

    def complete(self, step: PreparedStep, result: StepResult) -> StepResult:
        """The result of a step with what the mechanisms add to it."""
        for complete in self._completing:
            result = complete(step, result)
        return result

    @contextmanager
    def memory_errors(self, plan: StepPlan) -> Iterator[None]:
        """Turn a step's lack of memory into a RuntimeFailure of one line."""
        try:
            yield
        except (RuntimeError, MemoryError):
            problem = f"a step of {sum(len(row.tokens) for row in plan.rows)} tokens does not fit"
            with memory_errors(self.runner.device, problem, "lower --max-num-batched-tokens"):
                raise

    def abandon(self) -> None:
        """Drop what the mechanisms have under way: it will not be answered."""
        for mechanism in self.mechanisms:
            mechanism.abandon()

    def forget(self) -> None:
        """Forget all sequences: the content of the caches is of no use from now on."""
        self.runner.forget()
        self.abandon()

    # ---- what makes it faster --------------------------------------------------------------------

    def start(self, *, waited: bool = False) -> None:
        """Load what makes steps faster, or have another process build it; `waited` as in
        `BackgroundLibrary.start`."""
        for library in self._libraries:
            library.start(waited=waited)

    @property
    def pending(self) -> bool:
        return any(library.pending for library in self._libraries)

    @property
    def compiled(self) -> bool:
        """Whether Inductor has compiled the layers."""
        return self.layers is not None and self.layers.loaded

    def close(self) -> None:
        """End what the mechanisms have at work beside the device."""
        for mechanism in self.mechanisms:
            mechanism.close()
