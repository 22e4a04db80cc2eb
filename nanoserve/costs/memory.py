"""What fits into a device: weights first, keys and values in the rest."""

from dataclasses import replace

from nanoserve.costs.counts import STORED_BITS, ModelCounts
from nanoserve.costs.hardware import GIBI, Efficiency, Machine
from nanoserve.errors import UsageError

_MOST_STAGES = 1024
_USEFUL_TOKENS = 4096  # room for fewer keys and values is no advice
_LIBRARY_BYTES = GIBI / 2  # the CUDA context, workspaces of cuBLAS and buffers of NCCL, about


class DoesNotFit(UsageError):
    """The model is too large for its devices; the message says by how much, and what would fit."""


class DeviceMemory:
    """The memory of the devices of one replica. `step_tokens` are those of the largest step; 0 leaves steps out."""

    def __init__(self, counts: ModelCounts, machine: Machine, efficiency: Efficiency) -> None:
        self._counts, self._machine, self._efficiency = counts, machine, efficiency
        self._usable = machine.device.memory_bytes * efficiency.usable_memory

    def kv_bytes(self, stage: int, step_tokens: int = 0) -> float:
        """Bytes left for keys and values on one device of the stage; negative if the weights do not fit.

        Weights, keys and values take the usable share of memory, less if a step needs more. An engine decides the same
        way, by measuring its largest step before it makes a KV cache.
        """
        usable = self._usable
        if step_tokens:
            step = self._counts.step_bytes(step_tokens, stage)
            usable = min(usable, self._machine.device.memory_bytes - _LIBRARY_BYTES - step)
        return usable - self._counts.stage_weight_bytes(stage)

    def kv_blocks(self, block_size: int, step_tokens: int = 0) -> int:
        """Blocks of `block_size` tokens that every stage can hold: all stages share one block table.

        Raises DoesNotFit if there is no room for one block beside the weights.
        """
        blocks = min(
            int(self.kv_bytes(stage, step_tokens) // (block_size * self._counts.kv_bytes_per_token(stage)))
            for stage in range(len(self._counts.stages))
        )
        if blocks < 1 and step_tokens:
            self.kv_blocks(block_size)  # says what is missing without a step, if anything is
            raise DoesNotFit(f"a step of {step_tokens:,} tokens leaves no room for one KV block; let steps have fewer")
        if blocks < 1 and self._fits(self._counts):
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
        counts, device, usable = self._counts, self._machine.device, self._usable / GIBI
        needed = max(map(counts.stage_weight_bytes, range(len(counts.stages)))) / GIBI
        return (
            f"the model does not fit: {needed:.1f} GiB of weights on each {device.name} in layout {counts.layout.name},"
            f" {max(needed - usable, 0.0):.1f} GiB more than the {usable:.1f} GiB that can be used"
            f" ({self._efficiency.usable_memory:.0%} of {device.memory_bytes / GIBI:.4g} GiB), so that keys and values"
            f" have no room; {self._advice()}"
        )

    def _advice(self) -> str:
        """More stages of the same tensor degree, the first number that fits, or fewer bits."""
        counts, fitting = self._counts, []
        first, last = counts.layout.pipeline_parallel + 1, min(counts.model.num_layers, _MOST_STAGES)
        layouts = [
            replace(counts.layout, pipeline_parallel=stages, data_parallel=1) for stages in range(first, last + 1)
        ]
        if layouts and self._fits(ModelCounts(counts.model, layouts[-1], counts.precision)):
            larger = (ModelCounts(counts.model, layout, counts.precision) for layout in layouts)
            layout = next(filter(self._fits, larger)).layout
            fitting.append(f"{layout.devices} devices (layout {layout.name})")
        split = [counts.layers(stage) for stage in range(len(counts.stages))]
        for bits in [bits for bits in STORED_BITS if bits < counts.precision.weight_bits]:
            precision = replace(counts.precision, weight_bits=bits)
            if self._fits(ModelCounts(counts.model, counts.layout, precision, split)):
                fitting.append(f"{bits}-bit weights")
        return f"what would fit: {' or '.join(fitting)}" if fitting else "no number of these devices would fit it"

    def _fits(self, counts: ModelCounts) -> bool:
        """Whether these weights fit with room for a few thousand tokens."""
        return all(
            self._usable - counts.stage_weight_bytes(stage) >= _USEFUL_TOKENS * counts.kv_bytes_per_token(stage)
            for stage in range(len(counts.stages))
        )
