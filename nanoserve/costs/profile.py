"""Profile: what ``nanoserve profile`` measured of one model on one machine (APEX's offline profiler). No torch.

``MeasuredTimes`` (measured_times.py) and ``MeasuredPredictor`` (measured_predictor.py) answer from it; ``step_costs``
is the cost model with the factors it reaches. Times are seconds.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from nanoserve.config import ModelConfig
from nanoserve.costs.counts import Precision
from nanoserve.costs.curves import Curve, Grid
from nanoserve.costs.efficiency import Efficiency
from nanoserve.costs.hardware import Device, Link, Machine, Processor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.processes.files import replace_file

SCHEMA: Final = "nanoserve-profile/2"
_MOST_TOKENS = 2**28
"""Of a measured KV cache: each of its blocks takes some memory when it is simulated."""
_MOST_LAYERS = 100_000
_MOST_TIMES_AS_LONG = 1000.0
_SETTINGS = ("model", "dtype", "operators", "layers", "threads", "host_threads", "rounds")


class Reached(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device does at best: bytes read per second and operations per second of a large matrix product.

    Raises:
        ValueError: for what is not above 0.
    """

    name: str
    memory_bytes: float
    read_bytes_per_second: float
    operations_per_second: float

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "read_bytes_per_second", "operations_per_second"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)}")


class KvMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's KV cache, as large as it was when measured.

    Raises:
        ValueError: if it is empty, or beyond all measure.
    """

    kv_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.kv_tokens <= _MOST_TOKENS:
            raise ValueError(f"kv_tokens must be 1 to {_MOST_TOKENS}, not {str(self.kv_tokens)[:20]}")

    def kv_blocks(self, block_size: int) -> int:
        """Blocks of so many tokens.

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
    """In words."""
    real: tuple[RunFigures, ...]
    """Each run."""
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
    """Of the file."""
    about: dict[str, Any]
    """Machine, versions, command, commit and when."""
    settings: dict[str, str | int]
    """Model, number format, operators, threads of the device and of attention in host memory, whether layers are
    compiled."""
    foreign_cores: float | None
    """How many other programs kept busy meanwhile; None where the system does not tell."""
    model: ModelConfig
    """Its shape."""
    bits: int
    """Of weights, keys and values."""
    device: Reached
    host: Reached
    """What computes, and the CPU beside it, which is the device itself where there is no other."""
    memory: KvMemory
    """Of the KV cache."""
    linear: Curve
    """A layer without attention, over tokens; embedding and last norm are divided between the layers."""
    decode_attention: Grid
    """Attention of single tokens in one layer, on the device."""
    host_attention: Grid
    """The same by the threads that attend in host memory, beside a busy device, from handing over queries, keys and
    values until the result is there."""
    host_exchange: Curve
    """Over rows, the same for sequences of one key each: it is mostly handing over."""
    prefill_attention: Curve
    """Of one whole prompt in one layer, over its tokens."""
    copy: Curve
    """Between device memory and the CPU's, over bytes; one place to another where both are the same."""
    inputs: Curve
    """What an executor does in a step before its layers, over rows."""
    head: Curve
    """Logits and greedy sampling, over sampled rows."""
    engine: Curve
    """Scheduling, and taking answers in, over rows."""
    beside_host: float = 1.0
    """How many times as long a layer without attention takes while attention in host memory is busy too: above 1 where
    both read the same memory."""
    efficiency: Efficiency = Efficiency()
    """The factors that the machine reaches; ``step_costs`` predicts with them."""
    predictions: tuple[Prediction, ...] = ()
    """Workloads that ran for real, beside what was predicted."""

    def __post_init__(self) -> None:
        if missing := [name for name in _SETTINGS if name not in self.settings]:
            raise ValueError(f"settings must have {', '.join(missing)}")
        Precision(weight_bits=self.bits, kv_bits=self.bits, other_bits=self.bits)
        if not 1 <= self.beside_host <= _MOST_TIMES_AS_LONG:
            raise ValueError(f"beside_host must be 1 to {_MOST_TIMES_AS_LONG}, not {self.beside_host}")
        if not 1 <= self.model.num_layers <= _MOST_LAYERS:
            raise ValueError(f"num_layers must be 1 to {_MOST_LAYERS}, not {str(self.model.num_layers)[:20]}")

    @property
    def name(self) -> str:
        """Model and device."""
        return f"{self.settings['model']} on {self.device.name}"

    def with_factors(self, efficiency: Efficiency) -> "Profile":
        """The same with these factors."""
        return msgspec.structs.replace(self, efficiency=efficiency)

    def with_predictions(self, predictions: Sequence[Prediction]) -> "Profile":
        """The same with these predictions."""
        return msgspec.structs.replace(self, predictions=tuple(predictions))

    def rising(self) -> "Profile":
        """The same as far as nothing takes less for being larger, as medians of a busy machine sometimes have it."""
        return msgspec.structs.replace(self, **{name: found.rising() for name, found in self._measured().items()})

    def undisturbed(self) -> "Profile":
        """The same with lower quartiles for times: of a few samples, others disturb more than half now and then."""
        return msgspec.structs.replace(self, **{name: found.undisturbed() for name, found in self._measured().items()})

    def _measured(self) -> dict[str, Curve | Grid]:
        fields = {field.name: getattr(self, field.name) for field in msgspec.structs.fields(self)}
        return {name: found for name, found in fields.items() if isinstance(found, Curve | Grid)}

    def machine(self) -> Machine:
        """This machine as the cost model takes it: what was reached at best, of which ``efficiency`` has the shares."""
        sizes, seconds = self.copy.sizes, self.copy.seconds
        link = Link(
            name="copy",
            bandwidth=(sizes[-1] - sizes[0]) / max(seconds[-1] - seconds[0], 1e-12),
            latency=seconds[0],
            measured=True,
        )
        device, host = self.device, self.host
        return Machine(
            name=device.name,
            device=Device(
                name=device.name,
                memory_bytes=device.memory_bytes,
                memory_bandwidth=device.read_bytes_per_second,
                flops=device.operations_per_second,
                measured=False,
            ),
            devices_per_node=1,
            link=link,
            network=None,
            host_link=link,
            processor=Processor(
                name=host.name,
                memory_bandwidth=host.read_bytes_per_second,
                flops=host.operations_per_second,
                measured=False,
            ),
            host_memory_bytes=host.memory_bytes,
            source="nanoserve profile",
        )

    def step_costs(self) -> StepCosts:
        """The cost model of this machine with the factors it reaches."""
        precision = Precision(weight_bits=self.bits, kv_bits=self.bits, other_bits=self.bits)
        return StepCosts(self.model, self.machine(), precision=precision, efficiency=self.efficiency)


def read_profile(path: Path) -> Profile:
    """A profile that ``nanoserve profile --json`` wrote.

    Raises:
        UsageError: if the file is none, naming the key that is wrong.
    """
    try:
        if path.exists() and not path.is_file():  # a directory; or a pipe or device, reading which might never end
            raise UsageError(f"{path} is not a regular file")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.MsgspecError, NanoserveError) as error:
        raise UsageError(f"{path} is not a profile ({SCHEMA}): {error}") from error


def check_writable(path: Path) -> None:
    """That a profile can be written there, before anything is measured.

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
