"""What ``nanoserve simulate`` is asked for beside one layout of devices: host memory, and a pair of layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.simulate_measured import MeasuredHardware
from nanoserve.commands.simulate_options import MOST_BLOCKS, HardwareOptions, hardware_option
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.benchmarks.tables import Column
    from nanoserve.costs import ParallelLayout, StepCosts
    from nanoserve.costs.predictor import CostPredictor
    from nanoserve.simulator import OtherLayout

_OF_ONE_LAYOUT = ("stages", "tensor_parallel", "pp_split")
_ONE_LAYOUT = HardwareOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHardware:
    """What a policy is simulated on."""

    layouts: "Sequence[StepCosts]"
    """The times of each parallel layout; the first is current in the beginning."""
    kv_blocks: Sequence[int]
    """Of each layout's devices."""
    host_blocks: int
    """In host memory."""

    @property
    def name(self) -> str:
        """The layout, or the two of them."""
        first = self.layouts[0].layout
        if len(self.layouts) == 1:
            return f"{first.pipeline_parallel} stages x {first.tensor_parallel}"
        return " -> ".join(costs.layout.name for costs in self.layouts)

    @property
    def blocks_name(self) -> str:
        """How many blocks there are, and where."""
        device = " -> ".join(f"{blocks:,d}" for blocks in self.kv_blocks)
        return f"{device} KV blocks" + (f", {self.host_blocks:,d} in host memory" if self.host_blocks else "")

    @property
    def other_layouts(self) -> "list[OtherLayout]":
        """All but the first."""
        from nanoserve.simulator import OtherLayout

        pairs = list(zip(self.layouts, self.kv_blocks, strict=True))
        return [OtherLayout(costs, blocks) for costs, blocks in pairs[1:]]

    @property
    def predictors(self) -> "list[CostPredictor]":
        """One for each layout."""
        from nanoserve.costs.predictor import CostPredictor

        return [CostPredictor(costs, self.layouts) for costs in self.layouts]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """Host memory, and the layouts of Seesaw."""

    prefill_parallel: Annotated[
        str | None,
        hardware_option(
            "--prefill-parallel", "Layout for prompts (P4, T2P2), instead of --stages; with --decode-parallel.", "NAME"
        ),
    ] = None
    decode_parallel: Annotated[
        str | None, hardware_option("--decode-parallel", "Layout for decodes (T4), of as many devices.", "NAME")
    ] = None
    host_kv_memory: Annotated[
        float | None, hardware_option("--host-kv-memory", "Host memory for KV blocks; default: none.", "GIB")
    ] = None

    def simulated(self, hardware: HardwareOptions, step_tokens: int) -> SimulatedHardware | MeasuredHardware:
        """All that the options mean together; steps have so many tokens at most.

        Raises:
            UsageError: for layouts that do not suit each other, the model or the machine, for host memory that is
                not there or holds no block, and for a profile with layouts.
        """
        if hardware.profile is not None:
            if (self.prefill_parallel, self.decode_parallel) != (None, None):
                raise UsageError("--profile has one layout: leave --prefill-parallel and --decode-parallel out")
            measured = MeasuredHardware.of(hardware, hardware.profile)
            return measured.with_host_blocks(self._host_blocks(measured.profile.step_costs(), hardware.block_size))
        layouts = [hardware.costs(layout) for layout in self._layouts(hardware)]
        blocks = [hardware.kv_blocks(costs, step_tokens) for costs in layouts]
        host = self._host_blocks(layouts[0], hardware.block_size)
        return SimulatedHardware(layouts=layouts, kv_blocks=blocks, host_blocks=host)

    def _layouts(self, hardware: HardwareOptions) -> "list[ParallelLayout | None]":
        from nanoserve.costs import ParallelLayout

        if self.prefill_parallel is None and self.decode_parallel is None:
            return [None]
        if self.prefill_parallel is None or self.decode_parallel is None:
            raise UsageError("give both --prefill-parallel and --decode-parallel, or neither")
        if any(getattr(hardware, name) != getattr(_ONE_LAYOUT, name) for name in _OF_ONE_LAYOUT):
            raise UsageError("--prefill-parallel and --decode-parallel replace --stages, --tensor-parallel, --pp-split")
        pair = [ParallelLayout.parse(name) for name in (self.prefill_parallel, self.decode_parallel)]
        if any(layout.data_parallel > 1 for layout in pair):
            raise UsageError("data parallel layouts (D) are whole engines of their own: leave the D out")
        if pair[0].devices != pair[1].devices:
            raise UsageError(
                f"--prefill-parallel {pair[0].name} takes {pair[0].devices} devices and "
                f"--decode-parallel {pair[1].name} {pair[1].devices}: both run on the same ones"
            )
        return [*pair]

    def _host_blocks(self, costs: "StepCosts", block_size: int) -> int:
        from nanoserve.costs.hardware import GIBI
        from nanoserve.costs.tables import LARGEST

        if self.host_kv_memory is None:
            return 0
        if not 0 < self.host_kv_memory <= LARGEST:
            raise UsageError(
                f"--host-kv-memory must be a number of GiB above 0, not {self.host_kv_memory}; the most is {LARGEST:g}"
            )
        machine, wanted = costs.machine, self.host_kv_memory * GIBI
        if 0 < machine.host_memory_bytes < wanted:
            raise UsageError(
                f"--host-kv-memory {self.host_kv_memory:g} is more than the {machine.host_memory_bytes / GIBI:g} GiB "
                f"that a node of {machine.name} has"
            )
        blocks = costs.memory.host_kv_blocks(wanted, block_size)
        if not blocks:
            raise UsageError(f"--host-kv-memory {self.host_kv_memory:g} does not hold one block of {block_size} tokens")
        if blocks > MOST_BLOCKS:
            raise UsageError(
                f"--host-kv-memory {self.host_kv_memory:g} holds more than {MOST_BLOCKS} blocks of {block_size} tokens:"
                " give less, or a larger --block-size"
            )
        return blocks


def tier_columns(rows: Sequence[Mapping[str, Any]]) -> "list[Column]":
    """What a table shows beside the usual: of transitions, swaps and the host, if anything happened there."""
    from nanoserve.benchmarks.tables import Column

    columns = [
        Column("transitions", "transitions", ",d"),
        Column("take s", "transition_seconds", ",.1f"),
        Column("tokens out", "swapped_out_tokens", ",d"),
        Column("tokens in", "swapped_in_tokens", ",d"),
        Column("host mean", "host_occupancy", ".0%"),
        Column("host tokens", "host_tokens", ",d"),
        Column("CPU", "processor_share", ".0%"),
    ]
    return [column for column in columns if any(row[column.path] for row in rows)]
