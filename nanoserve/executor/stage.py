"""One device's part of a model at work: the steps that an executor of this process and a worker both take with a plan.

Each polls what has been built, begins the plan's swaps, computes its step, and reports what the CPU lost. Queueing and
collecting are a LocalExecutor's, activations and resharding a Worker's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.cpu_attention.hybrid_runner import HybridRunner
from nanoserve.executor.kv_transfer.host_pool import HostPart
from nanoserve.executor.kv_transfer.swapping import BlockMover, LayerMarks, Swapper
from nanoserve.executor.start.memory import kv_bytes_per_block, memory_errors
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.utils.sizes import format_size
from triton_ops.cpu import BackgroundLibrary, cpu_operators


def compiled_layers(decoder: Decoder, config: EngineConfig) -> LayerRunner | None:
    """The layers of a stage on a CPU, compiled ahead of time; None if all is to run eagerly. Compiled layers may round
    otherwise for another number of rows."""
    if config.eager or config.batch_invariant:
        return None
    return LayerRunner.ahead_of_time(
        decoder, block_size=config.block_size, operators=cpu_operators(), with_pieces=config.attends_on_host
    )


class Stage:
    """A runner, what moves blocks of its cache, and what is built in the background to make it faster."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        layers: LayerRunner | None = None,
        part: HostPart | None = None,
        processor: HostProcessor | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self.runner = runner
        self._batch_invariant = batch_invariant
        # The runner, if the CPU attends for host sequences.
        self.hybrid = runner if isinstance(runner, HybridRunner) else None
        self.processor, self.layers = processor, layers
        self.mover: BlockMover | None = None
        if part is not None:
            groups = runner.config.cache_groups
            last = {groups.tensor_of(layer)[0]: layer for layer in range(runner.config.num_layers)}
            last_layers = [last[tensor] for tensor in sorted(last)]
            self.mover = BlockMover(runner.caches.keys, runner.caches.values, part, runner.device, last_layers)
        self._libraries: list[BackgroundLibrary] = [] if layers is None else [*layers.libraries]
        if runner.device.type == "cpu":
            self._libraries.insert(0, cpu_operators())
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
        part: HostPart | None = None,
        processor: HostProcessor | None = None,
        batch_invariant: bool = False,
        **settings: Any,
    ) -> "Stage":
        """The stage of a decoder, with its KV cache. Raises RuntimeFailure if memory does not suffice, UsageError for a
        dtype whose answers cannot be `batch_invariant`.

        Without `layers` plain torch runs them. A part of the host pool is for swaps; with a processor too, that attends
        for the sequences whose KV is there. `settings` are others of the ModelRunner.
        """
        device = torch.device(device)
        settings |= {"num_blocks": num_blocks, "block_size": block_size, "device": device}
        size = format_size(num_blocks * kv_bytes_per_block(decoder.config, block_size, decoder.dtype))
        decoder.eval()
        if batch_invariant and decoder.dtype == torch.float32:
            raise UsageError("--batch-invariant is for 16 bits: choose --dtype bfloat16, or leave it out")
        if batch_invariant and not cpu_operators().wait():
            raise RuntimeFailure(f"--batch-invariant needs the C++ operators ({cpu_operators().problem}); leave it out")
        with memory_errors(device, f"a KV cache of {size} does not fit", "lower --kv-cache-memory"):
            if part is None or processor is None:
                runner = ModelRunner(decoder, run_layer=layers or DecoderLayer.__call__, **settings)
            else:
                layers, start_host = layers or LayerRunner(), partial(processor.start, decoder.config, part, device)
                runner = HybridRunner(decoder, layers, start_host, **settings)
            return cls(runner, layers=layers, part=part, processor=processor, batch_invariant=batch_invariant)

    # ---- with each plan ----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Load what has been built meanwhile: it takes over between two steps."""
        if self.runner.device.type == "cpu" and cpu_operators().loaded:  # one setting for all stages of the process
            torch.ops.nanoserve.set_batch_invariant(self._batch_invariant)
        if self._unloaded:
            for library in self._unloaded:
                library.poll()
            self._unloaded = [library for library in self._unloaded if not library.loaded]

    def begin_swaps(self, step: PreparedStep, swapper: Swapper | None) -> LayerMarks | None:
        """Have a plan's swaps carried out, behind all work issued so far. Returns marks of the step's layers if swaps
        follow them. Raises RuntimeError if there is no host pool, or a swap follows a row and the step has none on the
        device."""
        swaps = step.plan.swaps
        if not swaps:
            return None
        if swapper is None or self.mover is None:
            raise RuntimeError("this executor has no host pool")
        if step.inputs is None and any(swap.after_row for swap in swaps):
            raise RuntimeError("a swap follows a row, and the plan has none on the device")
        marks = swapper.begin(swaps, self.mover)
        if marks is not None and step.inputs is not None:
            step.inputs.computed = marks.computed
        return marks

    @contextmanager
    def memory_errors(self, problem: Callable[[], str]) -> Iterator[None]:
        """Turn a step's lack of memory into a RuntimeFailure of one line; `problem` as for `memory_errors`."""
        try:
            yield
        except (RuntimeError, MemoryError):
            with memory_errors(self.runner.device, problem(), "lower --max-num-batched-tokens"):
                raise

    def take_loss(self) -> str | None:
        """Why the CPU will not end what was under way here, if it was lost since the last call."""
        return None if self.hybrid is None else self.hybrid.hybrid.take_loss()

    def forget_host(self) -> None:
        """Drop all host sequences under way; nothing more is written for one."""
        if self.hybrid is not None:
            self.hybrid.forget_host()

    # ---- what makes it faster ----------------------------------------------------------------------------------

    def start(self, *, waited: bool = False) -> None:
        """Load what makes steps faster, or have another process build it; `waited` as in `BackgroundLibrary.start`."""
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
        """End the CPU's part, and let the device have all cores again."""
        if self.hybrid is not None:
            self.hybrid.hybrid.close()
        if self.processor is not None:
            self.processor.close()
