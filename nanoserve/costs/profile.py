"""Profile: the times that ``nanoserve profile`` measured of one model on one machine, in seconds
(APEX's offline profiler).

``MeasuredTimes`` and ``MeasuredPredictor`` answer from it; ``step_costs`` is the cost model with
calibrated factors.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.curves import Measured, MeasuredCurve, MeasuredGrid
from nanoserve.costs.hardware import Device, Efficiency, Link, Machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.scheduler.work import Chunk, StepWork
from nanoserve.utils.files import read_bytes, replace_file, unwritable_as_failure

# of a measured KV cache: each of its blocks takes some memory when it is simulated
_MOST_TOKENS = 2**28
_MOST_LAYERS = 100_000
_SETTINGS = ("model", "dtype", "operators", "layers", "threads", "host_threads", "rounds")
AnyProfile = TypeVar("AnyProfile", bound="ProfileFile")


class KvMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's KV cache, as large as it was when measured."""

    kv_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]

    def kv_blocks(self, block_size: int) -> int:
        """Raises UsageError if there is not room for one block."""
        if self.kv_tokens < block_size:
            raise UsageError(
                f"the profile's KV cache holds {self.kv_tokens} tokens, less than a block of "
                f"{block_size}"
            )
        return self.kv_tokens // block_size


class RunFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time until the last token, and the means over requests."""

    seconds: float
    ttft_ms: float
    tpot_ms: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A workload that ran for real, and its predictions."""

    workload: str
    real: tuple[RunFigures, ...]
    by_profile: RunFigures  # simulated over the measured times
    by_factors: RunFigures  # simulated over exact counts and the calibrated factors


class ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="schema"):
    """Measured times as a file has them; the tag of a kind is its schema."""


class Profile(ProfileFile, frozen=True, kw_only=True, tag="nanoserve-profile/3"):
    """Times of a model on a machine. Raises ValueError for a missing setting, wrong numbers of bits
    or layers, or a device without memory."""

    about: dict[str, Any]
    settings: dict[str, str | int]
    # cores that other programs kept busy meanwhile; None if the system does not tell
    foreign_cores: float | None
    model: ModelConfig
    bits: int  # of weights, keys and values
    device: Device
    # the best speeds of the device and of the CPU beside it; the same where the CPU is the device
    host: Device
    memory: KvMemory
    # a layer without attention, over tokens, with its share of embedding and last norm
    linear: MeasuredCurve
    decode_attention: MeasuredGrid  # attention of single tokens in one layer, on the device
    # by the threads in host memory, beside a busy device, until the result is back
    host_attention: MeasuredGrid
    # host attention over rows of one key each: mostly the time of handing over
    host_exchange: MeasuredCurve
    prefill_attention: MeasuredCurve  # attention of one whole prompt in one layer, over tokens
    # from device memory to the CPU's, over bytes; within it where both are the same
    copy: MeasuredCurve
    inputs: MeasuredCurve  # an executor's work in a step before the layers, over rows
    head: MeasuredCurve  # logits and greedy sampling, over sampled rows
    engine: MeasuredCurve  # scheduling, and taking answers in, over rows
    beside_host: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0
    """The factor by which a layer without attention slows down while attention in host memory is
    busy too."""
    efficiency: Efficiency = Efficiency()
    predictions: tuple[Prediction, ...] = ()

    def __post_init__(self) -> None:
        missing = [name for name in _SETTINGS if name not in self.settings]
        if missing:
            raise ValueError(f"settings must have {', '.join(missing)}")
        Precision.of(self.bits)
        for device in (self.device, self.host):
            if device.measured or not device.memory_bytes:
                raise ValueError("device and host must have memory_bytes, and no measured")
        if not 1 <= self.model.num_layers <= _MOST_LAYERS:
            raise ValueError(
                f"num_layers must be 1 to {_MOST_LAYERS}, not {str(self.model.num_layers)[:20]}"
            )

    @property
    def name(self) -> str:
        return f"{self.settings['model']} on {self.device.name}"

    def rising(self) -> "Profile":
        """Make times monotonic: on a busy machine medians sometimes fall with size."""
        return self._with(Measured.rising)

    def undisturbed(self) -> "Profile":
        """Take lower quartiles as times: other programs may disturb more than half of a few
        samples."""
        return self._with(Measured.undisturbed)

    def _with(self, change: Callable[[Measured], Measured]) -> "Profile":
        changed = {}
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, Measured):
                changed[name] = change(value)
        return msgspec.structs.replace(self, **changed)

    def swap_seconds(self, tokens: int) -> float:
        return self.copy.at(tokens * self.model.cache_groups.token_numbers * self.bits / 8)

    def step_costs(self) -> StepCosts:
        """The cost model of this machine: its best speeds, with the factors it reaches."""
        sizes, seconds = self.copy.sizes, self.copy.seconds
        longer = max(seconds[-1] - seconds[0], 1e-12)
        bandwidth = (sizes[-1] - sizes[0]) / longer
        link = Link("copy", bandwidth, latency=seconds[0], measured=True)
        machine = Machine(
            name=self.device.name,
            device=self.device,
            devices_per_node=1,
            link=link,
            host_link=link,
            processor=self.host,
            host_memory_bytes=self.host.memory_bytes,
            source="nanoserve profile",
        )
        return StepCosts(
            self.model, machine, precision=Precision.of(self.bits), efficiency=self.efficiency
        )


class MeasuredTimes:
    """A profile as the simulator's ``TieredTimes`` of one stage."""

    num_stages = 1

    def __init__(self, profile: Profile) -> None:
        model = profile.model
        self.profile, self.memory, self.num_layers = profile, profile.memory, model.num_layers
        # by window; one of 0 sees all
        self._layers = Counter(map(model.sliding_window, range(model.num_layers)))
        self._windows = tuple(sorted(window for window in self._layers if window))
        self._host_attention = profile.host_attention.less(profile.host_exchange).over_keys()

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        return StepWork.of(decode_contexts, chunks, sampled, self._windows)

    def stage_seconds(self, work: StepWork, stage: int = 0) -> float:
        return (
            self.layers_seconds(work.tokens)
            + self.attention_seconds(work)
            + self.ends_seconds(work)
        )

    def layers_seconds(self, tokens: int, stage: int = 0) -> float:
        return self.profile.linear.at(tokens) * self.num_layers

    def attention_seconds(self, work: StepWork, stage: int = 0) -> float:
        profile = self.profile
        return measured_attention(
            work, self._layers, self._windows, profile.decode_attention, profile.prefill_attention
        )

    def ends_seconds(self, work: StepWork, stage: int = 0) -> float:
        return self.profile.head.at(work.sampled)

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return 0.0

    def with_engine(self, seconds: float) -> "MeasuredTimes":
        """Set the time for scheduling and taking answers in, whatever the rows."""
        times = dict.fromkeys(("seconds", "low", "high"), (seconds, seconds))
        return MeasuredTimes(
            msgspec.structs.replace(self.profile, engine=MeasuredCurve(sizes=(1, 2), **times))
        )

    def host_seconds(self, work: StepWork) -> float:
        """With one device, no step is prepared while another one is computed."""
        return self.profile.inputs.at(work.rows) + self.profile.engine.at(work.rows)

    def swap_seconds(self, tokens: int, stage: int = 0) -> float:
        return self.profile.swap_seconds(tokens)

    def reload_seconds(self, stage: int) -> float:
        return float("inf")  # only one layout was measured

    def host_attention_seconds(self, context: int) -> float:
        return self._host_attention.at(context)

    def host_exchange_seconds(self, rows: int) -> float:
        return self.profile.host_exchange.at(rows)


def measured_attention(
    work: StepWork,
    layers: Mapping[int, int],
    windows: Sequence[int],
    decodes: MeasuredGrid,
    prompts: MeasuredCurve,
) -> float:
    """Seconds of attention on the device in these layers, counted by window, from what one layer
    takes. A chunk takes the difference of a prompt to its end and one to its beginning; of a prompt
    beyond a window, each token takes as long as the last one within it."""

    def prompt_seconds(tokens: int, window: int) -> float:
        if not window or tokens <= window:
            return prompts.at(tokens)
        last_token = max(0.0, prompts.at(window) - prompts.at(window - 1))
        return prompts.at(window) + (tokens - window) * last_token

    seconds = 0.0
    for window, count in layers.items():
        if work.decodes:
            keys = work.decode_context
            if window:
                keys = work.windowed_decode_context[windows.index(window)]
            seconds += count * decodes.at(work.decodes, keys / work.decodes)
        for start, length in work.chunks:
            longer = prompt_seconds(start + length, window) - prompt_seconds(start, window)
            # medians of a busy machine may fall from one size to the next
            seconds += count * max(0.0, longer)
    return seconds


def calibrate(profile: Profile) -> Efficiency:
    """The factors with which the cost model comes closest.

    ``matrix`` and ``attention`` are the shares of the peak that the largest measured sizes reach.
    ``memory`` and ``kernel_seconds`` are fitted together: of all shares in whole percents, with the
    best time per kernel for each, the pair with the least squared relative error over a layer of
    decoding, for every batch and context that was measured. ``step_seconds`` and ``row_seconds``
    are the line through the smallest and the largest number of rows. A share is never above 1: what
    a small model reads from the processor's caches counts as read at full bandwidth.
    """
    found = _Fit(profile).efficiency()
    costs = msgspec.structs.replace(profile, efficiency=found).step_costs()

    def beside(rows: int) -> float:
        """Seconds of a step beside its layers and beside the logits that the model counts."""
        head = costs.operator_seconds(costs.counts.product(costs.counts.head, rows))
        return max(
            0.0, profile.inputs.at(rows) + profile.engine.at(rows) + profile.head.at(rows) - head
        )

    few, many = profile.inputs.sizes[0], profile.inputs.sizes[-1]
    row_seconds = max(0.0, (beside(many) - beside(few)) / (many - few))
    step_seconds = max(0.0, beside(few) - few * row_seconds)
    return msgspec.structs.replace(found, step_seconds=step_seconds, row_seconds=row_seconds)


def _share(floor: float, seconds: float) -> float:
    return min(1.0, max(0.01, floor / seconds))


class _Fit:
    """Counts of one layer, the mean over all, beside its measured times."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._counts = ModelCounts(profile.model, precision=Precision.of(profile.bits))

    def _linear(self, tokens: int) -> list[tuple[float, float]]:
        """(bytes, operations) of each product of a layer, in parts of a layer where not all are
        equal."""
        layers, products = (
            self._profile.model.num_layers,
            self._counts.products(StepWork(decodes=tokens), 0),
        )
        return [(operator.bytes / layers, operator.flops / layers) for operator in products]

    def _linear_flops(self, tokens: int) -> float:
        return sum(flops for _, flops in self._linear(tokens))

    def _attention(
        self, keys: int, bandwidth: float | NDArray[np.float64], flops: float
    ) -> NDArray[np.float64]:
        """The least seconds of a layer's decode attention over this many keys, for one bandwidth or
        several."""
        moving, computing = (
            keys * self._counts.layer_kv_bytes,
            keys * self._counts.layer_flops_per_pair,
        )
        return np.maximum(moving / bandwidth, computing / flops)

    def efficiency(self) -> Efficiency:
        device, host, linear = self._profile.device, self._profile.host, self._profile.linear
        # Between the last two sizes a factor of two apart, so that overheads cancel.
        large = linear.sizes[-1]
        small = max([size for size in linear.sizes if size <= large / 2], default=linear.sizes[0])
        more_flops = self._linear_flops(large) - self._linear_flops(small)
        more_seconds = max(linear.at(large) - linear.at(small), 1e-12)
        matrix = _share(more_flops / device.flops, more_seconds)
        prompts, grid = self._profile.prefill_attention, self._profile.host_attention
        longest = prompts.sizes[-1]
        prompt_flops = self._counts.layer_flops_per_pair * (longest * (longest + 1) / 2)
        on_host = self._attention(
            grid.batches[-1] * grid.contexts[-1], host.memory_bandwidth, host.flops
        )
        memory, kernel_seconds = self._decode_factors(device.flops * matrix)
        return Efficiency(
            matrix=matrix,
            attention=_share(prompt_flops / device.flops, prompts.seconds[-1]),
            memory=memory,
            processor=_share(float(on_host), grid.seconds[-1][-1]),
            kernel_seconds=kernel_seconds,
        )

    def _decode_factors(self, flops: float) -> tuple[float, float]:
        """(memory, kernel_seconds), with this many operations per second."""
        shares = np.arange(1, 101) / 100
        bandwidth = self._profile.device.memory_bandwidth * shares
        # of each cell; a layer of decoding without the gaps between kernels, by share
        measured, models = [], []
        for batch, context, seconds in self._profile.decode_attention.cells():
            products = sum(
                np.maximum(size / bandwidth, count / flops) for size, count in self._linear(batch)
            )
            measured.append(self._profile.linear.at(batch) + seconds)
            models.append(self._attention(batch * context, bandwidth, flops) + products)
        times, model = np.array(measured), np.array(models).T
        # For each share, the gap with the least squared relative error has a closed form.
        missing = ((times - model) / times**2).sum(axis=1)
        gaps = np.maximum(0.0, missing / (1 / times**2).sum())
        errors = (model + gaps[:, None]) / times - 1
        best = int(np.argmin((errors**2).sum(axis=1)))
        return float(shares[best]), float(gaps[best]) / Efficiency().kernels_per_layer


def read_profile(path: Path, kind: type[AnyProfile]) -> AnyProfile:
    """A profile that ``write_profile`` wrote. Raises UsageError, naming the key that is wrong."""
    content = read_bytes(path, UsageError)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, NanoserveError) as error:
        raise UsageError(
            f"{path} is not a profile ({kind.__struct_config__.tag}): {error}"
        ) from error


def check_writable(path: Path) -> None:
    """Raise RuntimeFailure, before anything is measured, unless a profile can be written there."""
    with unwritable_as_failure(path):
        place = path.absolute().parent
        if path.exists() and not path.is_file():
            place = path
        writable = not path.is_dir() and os.access(place, os.W_OK)
    if not writable:
        raise RuntimeFailure(f"cannot write {path}: a directory, in no directory, or no permission")


def write_profile(profile: ProfileFile, path: Path) -> None:
    """Raises RuntimeFailure if the file cannot be written."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
