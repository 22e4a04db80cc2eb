"""One device's part of a model at work: the steps that an executor of this process and a worker both take with a plan.

Each polls what has been built, begins the plan's swaps, computes its step, and reports what the CPU lost. What differs
is theirs: queueing and collecting in a LocalExecutor, activations and resharding in a Worker.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.runtime.compile.layer_runner import LayerRunner
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.host.hybrid_runner import Header, HybridRunner, HybridStep
from nanoserve.runtime.launch.memory import memory_errors
from nanoserve.runtime.moves.host_pool import HostPart
from nanoserve.runtime.moves.swapping import BlockMover, LayerMarks, Swapper
from nanoserve.runtime.step.model_runner import ModelRunner, PreparedStep
from triton_ops.cpu import CpuOperators, cpu_operators


class Stage:
    """A runner, what moves blocks of its cache, and what is built in the background to make it faster."""

    def __init__(self, runner: ModelRunner, *, part: HostPart | None = None, layers: LayerRunner | None = None) -> None:
        """part: of the host pool, for swaps; layers: those that the runner runs, where they are compiled."""
        self.runner = runner
        # the runner, if the CPU attends for host sequences.
        self.hybrid = runner if isinstance(runner, HybridRunner) else None
        self.mover: BlockMover | None = None
        if part is not None:
            self.mover = BlockMover(runner.caches.keys, runner.caches.values, part, runner.device)
        self.layers = layers
        self._built: list[CpuOperators | LayerRunner] = []
        if runner.device.type == "cpu":
            self._built.append(cpu_operators())
        if layers is not None:
            self._built.append(layers)
        self._unloaded = self._built

    @classmethod
    def build(
        cls,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        layers: LayerRunner | None = None,
        run_layer: LayerFunction = DecoderLayer.__call__,
        pieces: LayerRunner | None = None,
        grammars: GrammarCompiler | None = None,
        storage: Tensor | None = None,
        part: HostPart | None = None,
        processor: HostProcessor | None = None,
    ) -> "Stage":
        """The stage of a decoder.

        Args:
            layers: compiled ones, which run as soon as they are loaded; without them `run_layer` runs the layers.
            pieces: run the layers in which host sequences take part, eagerly where there are none.
            grammars: compiles JSON schemas.
            storage: of the KV cache, as `make_caches` has it.
            part: of the host pool; with a `processor` too, that attends for the sequences whose KV is there.
        """
        run_layer = run_layer if layers is None else layers
        runner: ModelRunner
        if part is None or processor is None:
            runner = ModelRunner(
                decoder,
                num_blocks=num_blocks,
                block_size=block_size,
                device=device,
                run_layer=run_layer,
                grammars=grammars,
                storage=storage,
            )
        else:
            runner = HybridRunner(
                decoder,
                num_blocks=num_blocks,
                block_size=block_size,
                device=device,
                run_layer=run_layer,
                grammars=grammars,
                storage=storage,
                pieces=pieces or layers or LayerRunner(),
                make_host=lambda: processor.start(decoder.config, part, device),
            )
        return cls(runner, part=part, layers=layers)

    # ---- with each plan ----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Load what has been built meanwhile: it takes over between two steps."""
        if self._unloaded:
            for built in self._unloaded:
                built.poll()
            self._unloaded = [built for built in self._unloaded if not built.loaded]

    def begin_swaps(self, step: PreparedStep, swapper: Swapper | None) -> LayerMarks | None:
        """Have a plan's swaps carried out, behind what the device has been told to do so far.

        Returns:
            marks of the step's layers, if swaps follow them; None if not.

        Raises:
            RuntimeError: if there is no host pool, or a swap follows a row and the step has none on the device.
        """
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
        """A step that finds no memory says so in one line.

        Args:
            problem: says what did not fit, as in "a step of 7 tokens does not fit".

        Raises:
            RuntimeFailure: within, when memory runs out.
        """
        try:
            yield
        except (RuntimeError, MemoryError):
            with memory_errors(self.runner.device, problem(), "lower --max-num-batched-tokens"):
                raise

    def header_behind(self, step: PreparedStep) -> Header | None:
        """What goes to the next stage ahead of the hidden states of a step that is computed; None where the plan alone
        says how many come."""
        if self.hybrid is None or not isinstance(step, HybridStep):
            return None
        return self.hybrid.header_behind(step)

    def take_loss(self) -> str | None:
        """Why the CPU will not end what was under way here, if that has become known since the last call."""
        return None if self.hybrid is None else self.hybrid.hybrid.take_loss()

    def forget_host(self) -> None:
        """No host sequence is under way any more; nothing more is written for one."""
        if self.hybrid is not None:
            self.hybrid.forget_host()

    # ---- what makes it faster ----------------------------------------------------------------------------------

    def start(self, *, waited: bool = False) -> None:
        """Load what makes steps faster, or have it built by another process; `waited` as for one library."""
        for built in self._built:
            built.start(waited=waited)

    @property
    def pending(self) -> bool:
        """Whether something is being built."""
        return any(built.pending for built in self._built)

    @property
    def compiled(self) -> bool:
        """Whether the layers run compiled by AOT Inductor."""
        return self.layers is not None and self.layers.loaded

    def close(self) -> None:
        """End the CPU's part."""
        if self.hybrid is not None:
            self.hybrid.hybrid.close()
