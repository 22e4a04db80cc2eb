"""The profile by which policies with host attention predict: a given one, or one measured when the
engine starts."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch

from nanoserve import __version__
from nanoserve.config.model_config import ModelConfig, SamplingDefaults
from nanoserve.costs.hardware import Device, MachineSpeeds
from nanoserve.costs.profile import AnyProfile, Profile, calibrate, read_profile, write_profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.executor.cpu_attention.host_attention import HostAttentionLost
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.profiling.parts import (
    Effort,
    ProfileSizes,
    open_probes,
    profile_of,
    take_rounds,
)
from nanoserve.executor.stage import Stage
from nanoserve.executor.start.memory import memory_errors
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.models.hub import ProgressCallback
from nanoserve.utils.threads import physical_cores, processor_name_and_flags
from triton_ops.cpu import CannotBuild, cache_directory, cpu_operators

SIZES = ProfileSizes(
    tokens=(1, 3, 4, 8, 16, 64, 512),
    prompts=(16, 128, 1024),
    batches=(1, 8, 32),
    contexts=(16, 128, 1024),
    rows=(1, 3, 4, 8, 16, 32),
    copies=(2**16, 2**24),
    kv_bytes=2**28,
)
EFFORT = Effort(
    seconds=4.0, fewest_rounds=0, most_rounds=5, longest_sample=1.0, repeat_seconds=0.02
)
STAGE = "measuring this machine"
_MOSTLY = 0.8
_LOG = logging.getLogger("nanoserve")


@dataclass(frozen=True, slots=True)
class ProfileSetting:
    """The setting that measured times depend on most. Times of one setting say nothing about
    another."""

    device: str
    host: str
    """Names of the device and of the CPU beside it; the same name where the CPU is the device."""
    # the model's config, with fixed values in fields that do not change a step's time
    model: ModelConfig
    dtype: str
    threads: int | None
    """Threads of a device that is the CPU; None for a GPU."""
    host_threads: int

    def difference(self, profile: Profile) -> str | None:
        """In words, what the profile was made of, if that is another setting; None if it is this
        one."""
        settings = profile.settings
        if (profile.device.name, profile.host.name) != (self.device, self.host):
            names = dict.fromkeys((profile.device.name, profile.host.name))
            return f"another machine ({' with '.join(names)})"
        if profile.model.quantization != self.model.quantization:
            return f"{settings['model']} with weights in another form"
        if step_shape(profile.model) != self.model:
            return f"another model ({settings['model']})"
        if settings["dtype"] != self.dtype:
            return f"{settings['dtype']} numbers, not {self.dtype}"
        if settings["host_threads"] != self.host_threads:
            return (
                f"{settings['host_threads']} threads that attend in host memory, not "
                f"{self.host_threads}"
            )
        if self.threads is not None and settings["threads"] != self.threads:
            return f"a device of {settings['threads']} threads, not {self.threads}"
        return None


def step_shape(model: ModelConfig) -> ModelConfig:
    """The fields that a step's work depends on; the others are blank."""
    return replace(
        model,
        family="",
        dtype="",
        bos_token_id=None,
        eos_token_ids=(),
        sampling_defaults=SamplingDefaults(),
        tensor_names=None,
    )


@dataclass(frozen=True, kw_only=True)
class StartingEngine:
    """An engine on one device of this process that has nothing to do yet, and nothing in its KV
    cache."""

    stage: Stage
    config: EngineConfig
    model: ModelConfig
    """The whole model, of which the stage may have only some layers."""
    speeds: MachineSpeeds  # speeds that the device reached
    processor: HostProcessor
    """The part of the CPU that attends in host memory."""

    @property
    def runner(self) -> ModelRunner:
        return self.stage.runner

    @cached_property
    def setting(self) -> ProfileSetting:
        """The setting that its profile belongs to. Ask for it first in the thread that computes."""
        host, _ = processor_name_and_flags()
        device, threads = host, None
        if self.runner.device.type == "cuda":
            device = torch.cuda.get_device_properties(self.runner.device).name
        else:
            threads = torch.get_num_threads()
        return ProfileSetting(
            device=device,
            host=host,
            model=step_shape(self.model),
            dtype=str(self.runner.decoder.dtype).removeprefix("torch."),
            threads=threads,
            host_threads=self.processor.threads,
        )

    @property
    def code(self) -> dict[str, str]:
        """Name the code that computes: the CPU's operators, and the layers as they run now."""
        operators, layers = "plain torch", "eager"
        if cpu_operators().loaded:
            operators = "C++"
        if self.stage.compiled:
            layers = "compiled"
        return {"operators": operators, "layers": layers}

    def sizes(self) -> ProfileSizes:
        """The sizes at which it is measured. Raises UsageError if its steps are too small to be
        measured."""
        longest = self.config.max_model_len
        if longest is None:
            longest = self.model.max_position_embeddings
        cached = len(self.runner.caches.keys[0]) * self.config.block_size
        return SIZES.within(self.runner, self.config, context=min(longest, cached))


def hybrid_profile(
    engine: StartingEngine, progress: ProgressCallback | None = None
) -> Profile | None:
    """The profile of an engine whose policy attends in host memory. Call it from the thread that
    computes.

    Returns None, after one line of warning, if this machine cannot be measured. Raises UsageError
    if the file is no profile, or one of another setting.
    """
    if engine.config.profile is not None:
        path = Path(engine.config.profile)
        profile = read_profile(path, Profile)
        other = engine.setting.difference(profile)
        if other is not None:
            raise UsageError(
                f"{path} is a profile of {other}: leave --profile out, or make one with nanoserve"
                f" profile --host-threads {engine.setting.host_threads}"
            )
        return profile
    try:
        return profile_at_start(engine, progress)
    except (NanoserveError, HostAttentionLost) as reason:
        _LOG.warning(
            "nanoserve: the device does everything alone: no profile of this machine can be made "
            "(%s)",
            reason,
        )
        return None


def profile_at_start(engine: StartingEngine, progress: ProgressCallback | None = None) -> Profile:
    """A short profile: the one that an earlier start kept, or a new one, measured in 3 to 6 seconds
    and at most 20.

    It times few sizes, a few times each, with the layers as they run now. The result is kept in the
    user's cache folder under everything it depends on, unless other programs used the processors
    meanwhile. Raises UsageError for an engine whose steps are too small; otherwise as
    `measure_shortly`.
    """
    sizes, layers = engine.sizes(), engine.runner.config.num_layers
    path = kept_file(
        Profile, engine.setting, sizes, engine.config.block_size, layers, *engine.code.values()
    )
    measure = partial(measure_shortly, engine, sizes)
    return kept_or_measured(
        Profile, path, measure, progress, lambda found: found.about["undisturbed"] >= _MOSTLY
    )


def kept_or_measured(
    kind: type[AnyProfile],
    path: Path | None,
    measure: Callable[[], AnyProfile],
    progress: ProgressCallback | None,
    worth_keeping: Callable[[AnyProfile], bool],
) -> AnyProfile:
    """The profile that an earlier start kept in this file, or a new one."""
    if path is not None:
        with suppress(UsageError):  # it is not there, or damaged
            return read_profile(path, kind)
    if progress is not None:
        progress(STAGE, 0, 1)
    profile = measure()
    if progress is not None:
        progress(STAGE, 1, 1)
    if path is not None and worth_keeping(profile):
        with suppress(RuntimeFailure):  # the next start measures again
            write_profile(profile, path)
    return profile


def kept_file(kind: type[AnyProfile], *depends_on: object) -> Path | None:
    """The file in the user's cache for a profile that depends on all this, on the cores and on
    versions; None, after a warning, if no folder can be written."""
    versions = kind.__struct_config__.tag, __version__, str(torch.__version__)
    depending = msgspec.json.encode((versions, physical_cores(), depends_on), order="deterministic")
    key = hashlib.sha256(depending).hexdigest()[:24]
    try:
        return cache_directory(os.environ, "profiles") / f"{key}.json"
    except CannotBuild as reason:
        _LOG.warning("nanoserve: this machine is measured at every start: %s", reason)
        return None


def measure_shortly(engine: StartingEngine, sizes: ProfileSizes) -> Profile:
    """Measure now, without looking for a kept profile. Raises RuntimeFailure if there is no memory
    for it; HostAttentionLost if attention in host memory fails."""
    runner, setting, speeds = engine.runner, engine.setting, engine.speeds
    began, computed = time.perf_counter(), time.thread_time()
    with (
        memory_errors(
            runner.device, "measuring this machine does not fit", "lower --kv-cache-memory"
        ),
        open_probes(runner, engine.processor, sizes, block_size=engine.config.block_size) as probes,
    ):
        found = take_rounds(probes, lambda _: None, EFFORT)
    seconds = time.perf_counter() - began
    computed = time.thread_time() - computed
    undisturbed = 1.0
    # this thread computes all the time, unless others take its core
    if runner.device.type == "cpu":
        undisturbed = round(computed / seconds, 2)
    device = Device(
        name=setting.device,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bandwidth=speeds.memory_bandwidth,
        flops=speeds.flops,
    )
    profile = profile_of(
        found,
        runner,
        engine.processor,
        block_size=engine.config.block_size,
        about={
            "command": "measured at start",
            "seconds": round(seconds, 1),
            "undisturbed": undisturbed,
        },
        foreign_cores=None,
        settings={
            "model": runner.config.family,
            "dtype": setting.dtype,
            **engine.code,
            "threads": torch.get_num_threads(),
            "policy": engine.config.policy_name,
        },
        device=device,
        host=msgspec.structs.replace(device, name=setting.host),
    ).undisturbed()
    return msgspec.structs.replace(profile, efficiency=calibrate(profile), model=engine.model)
