"""What fits into a device: weights first, keys and values in the rest."""

from dataclasses import replace

from nanoserve.costs.counts import STORED_BITS, ModelCounts
from nanoserve.costs.efficiency import Efficiency
from nanoserve.costs.hardware import GIBI, Machine
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout

_MOST_STAGES = 1024
_USEFUL_TOKENS = 4096  # room for fewer keys and values is no advice
_LIBRARY_BYTES = GIBI / 2  # the CUDA context, workspaces of cuBLAS and buffers of NCCL, about


class DoesNotFit(UsageError):
    """The model is too large for its devices; the message says by how much, and what would fit."""


class DeviceMemory:
    """The memory of the devices of one replica.

    Args:
        counts: what the model's devices hold.
        machine: how large they are.
        efficiency: how much of a device is used.
    """

    def __init__(self, counts: ModelCounts, machine: Machine, efficiency: Efficiency) -> None:
        self._counts, self._machine, self._efficiency = counts, machine, efficiency

    def weight_bytes(self, stage: int) -> float:
        """Weights of one device of the stage."""
        return self._counts.stage_weight_bytes(stage)

    def usable_bytes(self, stage: int, step_tokens: int = 0) -> float:
        """Bytes for weights, keys and values on one device of the stage: the usable share, less if a step needs more.

        An engine decides the same way, by measuring its largest step before it makes a KV cache.

        Args:
            step_tokens: tokens of the largest step; 0 leaves steps out.
        """
        memory = self._machine.device.memory_bytes
        usable = memory * self._efficiency.usable_memory
        if not step_tokens:
            return usable
        return min(usable, memory - _LIBRARY_BYTES - self._counts.step_bytes(step_tokens, stage))

    def kv_bytes(self, stage: int, step_tokens: int = 0) -> float:
        """Bytes left for keys and values on one device of the stage; negative if the weights do not fit."""
        return self.usable_bytes(stage, step_tokens) - self.weight_bytes(stage)

    def kv_blocks(self, block_size: int, step_tokens: int = 0) -> int:
        """Blocks of `block_size` tokens that every stage can hold: all stages share one block table.

        Args:
            step_tokens: tokens of the largest step, whose activations need room too; 0 leaves steps out.

        Raises:
            DoesNotFit: if there is no room for one block beside the weights.
        """
        stages = range(len(self._counts.stages))
        sizes = [block_size * self._counts.kv_bytes_per_token(stage) for stage in stages]
        left = [self.kv_bytes(stage, step_tokens) for stage in stages]
        blocks = min(int(room // size) for room, size in zip(left, sizes, strict=True))
        if blocks < 1 and step_tokens:
            self.kv_blocks(block_size)  # says what is missing without a step, if anything is
            raise DoesNotFit(f"a step of {step_tokens:,} tokens leaves no room for one KV block; let steps have fewer")
        if blocks < 1 and self._fits():
            raise DoesNotFit(f"not one KV block of {block_size} tokens fits beside the weights; choose smaller blocks")
        if blocks < 1:
            raise DoesNotFit(self._refusal())
        return blocks

    def host_kv_blocks(self, host_bytes: float, block_size: int) -> int:
        """Blocks of this many tokens, all layers and all heads, in this much host memory."""
        model = self._counts.model
        per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * self._counts.precision.kv_bytes
        return int(host_bytes // (block_size * per_token))

    def _refusal(self) -> str:
        counts, device = self._counts, self._machine.device
        stage = max(range(len(counts.stages)), key=self.weight_bytes)
        needed, usable = self.weight_bytes(stage) / GIBI, self.usable_bytes(stage) / GIBI
        return (
            f"the model does not fit: {needed:.1f} GiB of weights on each {device.name} in layout {counts.layout.name},"
            f" {max(needed - usable, 0.0):.1f} GiB more than the {usable:.1f} GiB that can be used"
            f" ({self._efficiency.usable_memory:.0%} of {device.memory_bytes / GIBI:.4g} GiB), so that keys and values"
            f" have no room; {self._advice()}"
        )

    def _advice(self) -> str:
        counts, layout = self._counts, self._smallest_layout()
        fitting = [] if layout is None else [f"{layout.devices} devices (layout {layout.name})"]
        split = [counts.layers(stage) for stage in range(len(counts.stages))]
        for bits in [bits for bits in STORED_BITS if bits < counts.precision.weight_bits]:
            precision = replace(counts.precision, weight_bits=bits)
            if self._would_fit(ModelCounts(counts.model, counts.layout, precision, split)):
                fitting.append(f"{bits}-bit weights")
        return f"what would fit: {' or '.join(fitting)}" if fitting else "no number of these devices would fit it"

    def _smallest_layout(self) -> ParallelLayout | None:
        """More stages of the same tensor degree: the first number that fits."""
        model, layout = self._counts.model, self._counts.layout
        numbers = range(layout.pipeline_parallel + 1, min(model.num_layers, _MOST_STAGES) + 1)

        def fits(number: int) -> bool:
            return self._would_fit(ModelCounts(model, larger(number), self._counts.precision))

        def larger(number: int) -> ParallelLayout:
            return ParallelLayout(tensor_parallel=layout.tensor_parallel, pipeline_parallel=number)

        return larger(next(filter(fits, numbers))) if numbers and fits(numbers[-1]) else None

    def _would_fit(self, counts: ModelCounts) -> bool:
        return DeviceMemory(counts, self._machine, self._efficiency)._fits()

    def _fits(self) -> bool:
        """Whether the weights fit with room for a few thousand tokens."""
        stages, per_token = range(len(self._counts.stages)), self._counts.kv_bytes_per_token
        return all(self.kv_bytes(stage) >= _USEFUL_TOKENS * per_token(stage) for stage in stages)
