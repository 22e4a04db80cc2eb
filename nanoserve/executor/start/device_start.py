"""Gets a device ready for a model, in an engine's own process and in each worker alike, and
attaches what the engine's settings ask for."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.stage import Stage, compiled_layers
from nanoserve.executor.start.memory import kv_bytes_per_block
from nanoserve.models.decoder import Decoder
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.text.grammar.compiler import GrammarCompiler

if TYPE_CHECKING:
    from nanoserve.executor.cpu_attention.host_processor import HostProcessor
    from nanoserve.executor.drafting.drafter import Drafter
    from nanoserve.executor.kv_transfer.host_pool import HostPart, HostPool
    from nanoserve.executor.start.drafters import DrafterStart
    from nanoserve.executor.start.gpu_start import GpuStart


class DeviceStart:
    """A device with its decoders, one for each parallel layout, and without their KV cache."""

    def __init__(
        self,
        resolved: ResolvedModel,
        config: EngineConfig,
        decoders: Sequence[Decoder],
        device: torch.device,
        *,
        in_worker: bool = False,
    ) -> None:
        self._resolved, self._config, self._decoders, self._device = (
            resolved,
            config,
            decoders,
            device,
        )
        self._in_worker = in_worker
        self.gpus: list[GpuStart] = []
        if device.type == "cuda":
            from nanoserve.executor.start import gpu_start

            self.gpus = [gpu_start.GpuStart(decoder, config, device) for decoder in decoders]
        self._drafting: DrafterStart | None = None
        if config.speculate is not None and decoders[0].shard.answers:
            from nanoserve.executor.start.drafters import load_drafter

            gpu = self.gpus[0] if self.gpus else None
            self._drafting = load_drafter(config, resolved, decoders[0], gpu)
        self.drafter_bytes = 0
        """Bytes of a drafter's cache beside each block."""
        if self._drafting is not None:
            self.drafter_bytes = self._drafting.block_bytes
        self.block_bytes = tuple(
            kv_bytes_per_block(one.config, config.block_size, one.dtype) + self.drafter_bytes
            for one in decoders
        )
        """Size of a KV block by layout, with that."""
        self.state_bytes = decoders[0].config.state_bytes(decoders[0].dtype.itemsize)
        """Size of a slot for recurrent states; 0 if the layers here have none."""

    def reserved_bytes(self, progress: ProgressCallback | None = None) -> int:
        """Memory that must stay free beside the KV cache: for the largest step, and for what swaps
        are staged in."""
        longest = self._config.max_model_len or self._decoders[0].config.max_position_embeddings
        measured = [gpu.measure(longest, progress) for gpu in self.gpus]
        # One layout runs at a time, but the graphs of all keep their memory.
        graphs = [gpu.graph_bytes for gpu in self.gpus]
        steps = [both - own for both, own in zip(measured, graphs, strict=True)]
        reserved = max(steps, default=0) + sum(graphs)
        if self.gpus and self._config.uses_host_memory:
            from nanoserve.executor.kv_transfer.gpu_staging import staging_memory

            reserved += sum(map(staging_memory, self.block_bytes))
        return reserved

    @cached_property
    def layers(self) -> list[LayerRunner | None]:
        """The runner of each decoder's layers; on a CPU it is compiled for the threads there are at
        the first use."""
        found: list[LayerRunner | None] = [gpu.layers for gpu in self.gpus]
        if not found:
            found = [compiled_layers(decoder, self._config) for decoder in self._decoders]
        if (
            self._drafting is not None
            and self._drafting.layers is not None
            and found[0] is not None
        ):
            # which are built and loaded with the model's own
            found[0].libraries += self._drafting.layers.libraries
        return found

    def stages(
        self,
        num_blocks: Sequence[int],
        pool: "HostPool | None" = None,
        processor: "HostProcessor | None" = None,
        storage: Tensor | None = None,
        *,
        state_slots: int = 0,
        async_scheduling: bool = False,
    ) -> list[Stage]:
        """Make a stage for each decoder, with a cache of its number of blocks, and slots for
        recurrent states; raises what `Stage.build` raises."""
        drafter = self._drafting.build(num_blocks[0]) if self._drafting is not None else None
        stages = list[Stage]()
        for decoder, layers, blocks in zip(self._decoders, self.layers, num_blocks, strict=True):
            mechanisms = list[Mechanism]()
            if pool is not None:
                mechanisms.extend(
                    self._host_mechanisms(pool.part(decoder.shard), processor, layers)
                )
            if state_slots:
                mechanisms.append(_state_slots(state_slots))
            if decoder.config.canvas is not None:
                mechanisms.append(_canvas_denoising(decoder.config.canvas, self._config))
            if async_scheduling:
                mechanisms.append(_fed_tokens())
            if self._config.speculate is not None:
                mechanisms.extend(_draft_mechanisms(drafter))
            stage = Stage.build(
                decoder,
                num_blocks=blocks,
                block_size=self._config.block_size,
                device=self._device,
                layers=layers,
                mechanisms=mechanisms,
                batch_invariant=self._config.batch_invariant,
                grammars=GrammarCompiler(
                    self._resolved.tokenizer_directory, decoder.config.vocab_size
                ),
                storage=storage,
            )
            stages.append(stage)
        return stages

    def _host_mechanisms(
        self, part: "HostPart", processor: "HostProcessor | None", layers: LayerRunner | None
    ) -> list[Mechanism]:
        """Make the mechanisms of host memory: swaps, and attention there if a processor is set
        apart for it."""
        from nanoserve.executor.kv_transfer.transfer import LocalKvTransfer, WorkerKvTransfer

        if layers is None:
            layers = LayerRunner()
        found = list[Mechanism]()
        if self._in_worker:
            if processor is not None:
                from nanoserve.executor.cpu_attention.pipeline import WorkerCpuAttention

                found.append(WorkerCpuAttention(processor, layers, part))
            found.append(WorkerKvTransfer(part))
        else:
            if processor is not None:
                from nanoserve.executor.cpu_attention.cpu_attention import LocalCpuAttention

                found.append(LocalCpuAttention(processor, layers, part))
            found.append(LocalKvTransfer(part))
        return found


def _state_slots(num_slots: int) -> Mechanism:
    """Keep the recurrent states of the layers."""
    from nanoserve.executor.recurrent_state.state_storage import StateStorage

    return StateStorage(num_slots)


def _canvas_denoising(canvas: CanvasConfig, config: EngineConfig) -> Mechanism:
    """Settle the tokens of canvases."""
    from nanoserve.executor.canvas.choice import make_denoising

    return make_denoising(canvas, config.denoising)


def _fed_tokens() -> Mechanism:
    """Launch the next step while the device computes one."""
    from nanoserve.executor.async_scheduling.placeholder_tokens import PlaceholderTokens

    return PlaceholderTokens()


def _draft_mechanisms(drafter: "Drafter | None") -> list[Mechanism]:
    """Make the mechanisms of draft tokens, which a drafter proposes here, or the scheduler."""
    from nanoserve.executor.drafting.drafting import Drafting
    from nanoserve.executor.drafting.verification import Verification

    if drafter is None:
        return [Verification()]
    return [Verification(), Drafting(drafter)]
