"""The hardware that ``nanoserve simulate`` runs on: by the cost model, or as ``nanoserve profile`` measured it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.commands.simulate_options import MOST_BLOCKS, HardwareOptions
from nanoserve.costs import StepCosts, load_machine, load_shape
from nanoserve.costs.hardware import GIBI
from nanoserve.costs.measured_times import MeasuredPredictor, MeasuredTimes
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.profile import read_profile
from nanoserve.errors import UsageError
from nanoserve.processes.sizes import parse_size
from nanoserve.simulator import OtherLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHardware:
    """What a policy is simulated on."""

    name: str
    """The layout, or the two of them."""
    layouts: Sequence[StepCosts | MeasuredTimes]
    """The times of each parallel layout; the first is current in the beginning."""
    predictors: Sequence[CostPredictor | MeasuredPredictor]
    """One for each layout."""
    kv_blocks: Sequence[int]
    """Blocks on the devices of each layout."""
    host_blocks: int
    """Blocks in host memory."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a report says of it where the options do not."""

    @classmethod
    def of(cls, options: HardwareOptions, step_tokens: int) -> "SimulatedHardware":
        """All that the options mean together; steps have at most ``step_tokens`` tokens.

        Raises:
            UsageError: for an unknown model or machine, for layouts that do not suit each other, the model or the
                machine, for host memory that is not there or holds no block, and for options that a profile answers.
        """
        if options.profile is not None:
            return _measured(options, options.profile)
        split, shape, machine = options.split, load_shape(options.model), load_machine(options.hardware)
        costs = [StepCosts(shape, machine, layout, pipeline_split=split) for layout in options.layouts()]
        first = costs[0].layout
        return cls(
            name=f"{first.pipeline_parallel} stages x {first.tensor_parallel}"
            if len(costs) == 1
            else " -> ".join(each.layout.name for each in costs),
            layouts=costs,
            predictors=[CostPredictor(each, costs) for each in costs],
            kv_blocks=[_kv_blocks(options, each, step_tokens) for each in costs],
            host_blocks=_host_blocks(options, costs[0]),
        )

    @property
    def blocks_name(self) -> str:
        """How many blocks there are, and where."""
        device = " -> ".join(f"{blocks:,d}" for blocks in self.kv_blocks)
        return f"{device} KV blocks" + (f", {self.host_blocks:,d} in host memory" if self.host_blocks else "")

    @property
    def other_layouts(self) -> list[OtherLayout]:
        """All but the first."""
        pairs = list(zip(self.layouts, self.kv_blocks, strict=True))
        return [OtherLayout(costs, blocks) for costs, blocks in pairs[1:]]


def _measured(options: HardwareOptions, path: Path) -> SimulatedHardware:
    """One layout of one stage, by the profile in a file; it has as many blocks as the measured engine had."""
    if (options.prefill_parallel, options.decode_parallel) != (None, None):
        raise UsageError("--profile has one layout: leave --prefill-parallel and --decode-parallel out")
    if options.changed("model", "hardware", "pp", "tp", "pp_split", "metadata"):
        raise UsageError("--profile brings model and machine, and has one stage: leave the options for these out")
    times = MeasuredTimes(read_profile(path))
    blocks = options.num_blocks or times.memory.kv_blocks(options.block_size)
    _check_countable(blocks)
    model, device = times.profile.settings["model"], times.profile.device.name
    return SimulatedHardware(
        name="as measured",
        layouts=[times],
        predictors=[MeasuredPredictor(times.profile)],
        kv_blocks=[blocks],
        host_blocks=_host_blocks(options, times.profile.step_costs()),
        facts={"model": model, "hardware": device, "stages": 1, "tensor_parallel": 1},
    )


def _kv_blocks(options: HardwareOptions, costs: StepCosts, step_tokens: int) -> int:
    """The blocks that were asked for, or as many as fit beside the weights and a step."""
    fitting = costs.memory.kv_blocks(options.block_size, step_tokens)
    if options.num_blocks is None:
        _check_countable(fitting)
        return fitting
    if options.num_blocks > fitting:
        raise UsageError(
            f"--num-blocks {options.num_blocks}: only {fitting} blocks of {options.block_size} tokens fit beside the "
            f"weights in layout {costs.layout.name}; ask for fewer, or for more devices"
        )
    return options.num_blocks


def _check_countable(blocks: int) -> None:
    if blocks > MOST_BLOCKS:
        raise UsageError(f"{blocks:,d} KV blocks fit, more than can be simulated: give --num-blocks")


def host_kv_bytes(options: HardwareOptions) -> int | None:
    """Bytes of host memory that were asked for.

    Raises:
        UsageError: for what is no size, or has no unit.
    """
    size = options.host_kv_memory
    if size is None:
        return None
    if re.fullmatch(r"[\d.]+", size):
        raise UsageError(f"--host-kv-memory {size:.40} has no unit: say {size:.40}GiB")
    try:
        return parse_size(size)
    except UsageError as error:
        raise UsageError(f"--host-kv-memory: {error}") from None


def _host_blocks(options: HardwareOptions, costs: StepCosts) -> int:
    wanted, size, block_size = host_kv_bytes(options), options.host_kv_memory, options.block_size
    if wanted is None:
        return 0
    machine = costs.machine
    if 0 < machine.host_memory_bytes < wanted:
        raise UsageError(
            f"--host-kv-memory {size} is more than the {machine.host_memory_bytes / GIBI:g} GiB "
            f"that a node of {machine.name} has"
        )
    blocks = costs.memory.host_kv_blocks(wanted, block_size)
    if not blocks:
        raise UsageError(f"--host-kv-memory {size} does not hold one block of {block_size} tokens")
    if blocks > MOST_BLOCKS:
        raise UsageError(
            f"--host-kv-memory {size} holds more than {MOST_BLOCKS} blocks of {block_size} tokens:"
            " give less, or a larger --block-size"
        )
    return blocks
