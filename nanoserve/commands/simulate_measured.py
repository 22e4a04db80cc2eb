"""What ``nanoserve simulate --profile`` runs on: a model on this machine, as ``nanoserve profile`` measured it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.commands.simulate_options import MOST_BLOCKS, HardwareOptions
from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.costs.measured_times import MeasuredPredictor, MeasuredTimes
    from nanoserve.costs.profile import Profile
    from nanoserve.simulator import OtherLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHardware:
    """One layout of one stage, as SimulatedHardware of the cost model's layouts."""

    layouts: "tuple[MeasuredTimes]"
    """The measured times."""
    kv_blocks: tuple[int]
    """As many as the measured engine had, unless others are asked for."""
    host_blocks: int = 0
    """In host memory."""

    @classmethod
    def of(cls, hardware: HardwareOptions, path: Path) -> "MeasuredHardware":
        """By the profile in this file.

        Raises:
            UsageError: if it is none, and for options that the profile has an answer to.
        """
        from nanoserve.costs.measured_times import MeasuredTimes
        from nanoserve.costs.profile import read_profile

        answered, defaults = (
            ("model", "hardware", "stages", "tensor_parallel", "pp_split", "metadata"),
            HardwareOptions(),
        )
        if any(getattr(hardware, name) != getattr(defaults, name) for name in answered):
            raise UsageError("--profile brings model and machine, and has one stage: leave the options for these out")
        times = MeasuredTimes(read_profile(path))
        blocks = hardware.num_blocks or times.memory.kv_blocks(hardware.block_size)
        if blocks > MOST_BLOCKS:
            raise UsageError(f"{blocks:,d} KV blocks fit, more than can be simulated: give --num-blocks")
        return cls(layouts=(times,), kv_blocks=(blocks,))

    def with_host_blocks(self, host_blocks: int) -> "MeasuredHardware":
        """The same with so many blocks in host memory."""
        return replace(self, host_blocks=host_blocks)

    @property
    def profile(self) -> "Profile":
        return self.layouts[0].profile

    @property
    def facts(self) -> Mapping[str, Any]:
        """What a report says of it, in the words of the options."""
        return {
            "model": self.profile.settings["model"],
            "hardware": self.profile.device.name,
            "stages": 1,
            "tensor_parallel": 1,
        }

    @property
    def name(self) -> str:
        return "as measured"

    @property
    def blocks_name(self) -> str:
        host = f", {self.host_blocks:,d} in host memory" if self.host_blocks else ""
        return f"{self.kv_blocks[0]:,d} KV blocks{host}"

    @property
    def other_layouts(self) -> "Sequence[OtherLayout]":
        return ()

    @property
    def predictors(self) -> "Sequence[MeasuredPredictor]":
        from nanoserve.costs.measured_times import MeasuredPredictor

        return (MeasuredPredictor(self.profile),)
