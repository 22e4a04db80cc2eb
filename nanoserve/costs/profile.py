"""Profile: what ``nanoserve profile`` measured of one model on one machine (APEX's offline profiler). No torch.

``MeasuredTimes`` and ``MeasuredPredictor`` (measured_times.py) answer from it; ``step_costs`` is the cost model with
the factors it reaches. Times are seconds.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import Precision
from nanoserve.costs.curves import Measured, MeasuredCurve, MeasuredGrid
from nanoserve.costs.efficiency import Efficiency
from nanoserve.costs.hardware import Device, Link, Machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.processes.files import read_bytes, replace_file

SCHEMA: Final = "nanoserve-profile/2"
_MOST_TOKENS = 2**28
"""Limit for a measured KV cache: each of its blocks takes some memory when it is simulated."""
_MOST_LAYERS = 100_000
_MOST_TIMES_AS_LONG = 1000.0
_SETTINGS = ("model", "dtype", "operators", "layers", "threads", "host_threads", "rounds")


PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class Reached(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device does at best: bytes read per second and operations per second of a large matrix product."""

    name: str
    memory_bytes: PositiveFloat
    read_bytes_per_second: PositiveFloat
    operations_per_second: PositiveFloat

    @property
    def device(self) -> Device:
        """The same in the terms of the cost model; ``Efficiency`` has the shares of it that are reached."""
        return Device(
            name=self.name,
            memory_bytes=self.memory_bytes,
            memory_bandwidth=self.read_bytes_per_second,
            flops=self.operations_per_second,
            measured=False,
        )


class KvMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's KV cache, as large as it was when measured."""

    kv_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]

    def kv_blocks(self, block_size: int) -> int:
        """Blocks of `block_size` tokens.

        Raises:
            UsageError: if there is not room for one.
        """
        if self.kv_tokens < block_size:
            raise UsageError(f"the profile's KV cache holds {self.kv_tokens} tokens, less than a block of {block_size}")
        return self.kv_tokens // block_size


class RunFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run in three numbers: until the last token, and the means over its requests."""

    seconds: float
    ttft_ms: float
    tpot_ms: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload that ran for real, and what was predicted."""

    workload: str
    """Description in words."""
    real: tuple[RunFigures, ...]
    """Metrics of each run."""
    by_profile: RunFigures
    """The simulator over the measured times."""
    by_factors: RunFigures
    """The simulator over exact counts and the calibrated factors."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a model on a machine.

    Raises:
        ValueError: for a setting that is missing, bits that no number has, or a number beyond all measure.
    """

    schema: Literal["nanoserve-profile/2"]
    """Schema of the file."""
    about: dict[str, Any]
    """Machine, versions, command, commit and when."""
    settings: dict[str, str | int]
    """Model, number format, operators, threads of the device and of attention in host memory, whether layers are
    compiled."""
    foreign_cores: float | None
    """Cores that other programs kept busy meanwhile; None if the system does not tell."""
    model: ModelConfig
    """The model's shape."""
    bits: int
    """Bits of weights, keys and values."""
    device: Reached
    host: Reached
    """The device and the CPU beside it; the same where the CPU is the device."""
    memory: KvMemory
    """The KV cache."""
    linear: MeasuredCurve
    """A layer without attention, over tokens; embedding and last norm are divided between the layers."""
    decode_attention: MeasuredGrid
    """Attention of single tokens in one layer, on the device."""
    host_attention: MeasuredGrid
    """Attention by the threads in host memory, beside a busy device, from handing over queries, keys and values until
    the result is there."""
    host_exchange: MeasuredCurve
    """Host attention for sequences of one key each, over rows: mostly the time of handing over."""
    prefill_attention: MeasuredCurve
    """Attention of one whole prompt in one layer, over its tokens."""
    copy: MeasuredCurve
    """Between device memory and the CPU's, over bytes; one place to another where both are the same."""
    inputs: MeasuredCurve
    """Work of an executor in a step before the layers, over rows."""
    head: MeasuredCurve
    """Logits and greedy sampling, over sampled rows."""
    engine: MeasuredCurve
    """Scheduling, and taking answers in, over rows."""
    beside_host: Annotated[float, msgspec.Meta(ge=1, le=_MOST_TIMES_AS_LONG)] = 1.0
    """How many times as long a layer without attention takes while attention in host memory is busy too: above 1 where
    both read the same memory."""
    efficiency: Efficiency = Efficiency()
    """The factors that the machine reaches; ``step_costs`` predicts with them."""
    predictions: tuple[Prediction, ...] = ()
    """Workloads that ran for real, beside what was predicted."""

    def __post_init__(self) -> None:
        if missing := [name for name in _SETTINGS if name not in self.settings]:
            raise ValueError(f"settings must have {', '.join(missing)}")
        Precision.of(self.bits)
        if not 1 <= self.model.num_layers <= _MOST_LAYERS:
            raise ValueError(f"num_layers must be 1 to {_MOST_LAYERS}, not {str(self.model.num_layers)[:20]}")

    @property
    def name(self) -> str:
        """Model and device."""
        return f"{self.settings['model']} on {self.device.name}"

    def with_factors(self, efficiency: Efficiency) -> "Profile":
        """The same with these factors."""
        return msgspec.structs.replace(self, efficiency=efficiency)

    def rising(self) -> "Profile":
        """The same with monotonic times: on a busy machine medians sometimes fall with size."""
        return self._with(lambda measured: measured.rising())

    def undisturbed(self) -> "Profile":
        """The same with lower quartiles as times: other programs may disturb more than half of a few samples."""
        return self._with(lambda measured: measured.undisturbed())

    def _with(self, change: Callable[[Measured], Measured]) -> "Profile":
        """The same with all measured times changed."""
        fields = msgspec.structs.asdict(self).items()
        return msgspec.structs.replace(self, **{name: change(one) for name, one in fields if isinstance(one, Measured)})

    def machine(self) -> Machine:
        """This machine in the terms of the cost model: the best speeds, of which ``efficiency`` has the shares."""
        sizes, seconds = self.copy.sizes, self.copy.seconds
        link = Link(
            name="copy",
            bandwidth=(sizes[-1] - sizes[0]) / max(seconds[-1] - seconds[0], 1e-12),
            latency=seconds[0],
            measured=True,
        )
        return Machine(
            name=self.device.name,
            device=self.device.device,
            devices_per_node=1,
            link=link,
            host_link=link,
            processor=self.host.device,
            host_memory_bytes=self.host.memory_bytes,
            source="nanoserve profile",
        )

    def step_costs(self) -> StepCosts:
        """The cost model of this machine with the factors it reaches."""
        return StepCosts(self.model, self.machine(), precision=Precision.of(self.bits), efficiency=self.efficiency)


def read_profile(path: Path) -> Profile:
    """A profile that ``nanoserve profile --json`` wrote.

    Raises:
        UsageError: if the file is no profile, naming the key that is wrong.
    """
    content = read_bytes(path, UsageError)
    try:
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.MsgspecError, NanoserveError) as error:
        raise UsageError(f"{path} is not a profile ({SCHEMA}): {error}") from error


def check_writable(path: Path) -> None:
    """Check that a profile can be written there, before anything is measured.

    Raises:
        RuntimeFailure: if not.
    """
    try:
        place = path if path.exists() and not path.is_file() else path.absolute().parent
        writable = not path.is_dir() and os.access(place, os.W_OK)
    except OSError as error:
        raise RuntimeFailure(f"cannot write {path}: {error.strerror or error}") from error
    if not writable:
        raise RuntimeFailure(f"cannot write {path}: a directory, in no directory, or no permission")


def write_profile(profile: Profile, path: Path) -> None:
    """One JSON object.

    Raises:
        RuntimeFailure: if the file cannot be written.
    """
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile, order="deterministic"), indent=1) + b"\n")
