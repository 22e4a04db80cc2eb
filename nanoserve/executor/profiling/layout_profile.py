"""measure_layouts: the profile of a number of worker processes, kept by an earlier call or measured
now."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import msgspec
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.curves import MeasuredCurve
from nanoserve.costs.layout_profile import LayoutProfile
from nanoserve.costs.profile import read_profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.profiling.scheduler_cost import measure_scheduler
from nanoserve.executor.profiling.start_profile import kept_file, kept_or_measured, step_shape
from nanoserve.executor.start.model_loading import (
    read_config,
    refuse_canvases,
    refuse_states,
)
from nanoserve.executor.start.rendezvous import TorchrunProcess
from nanoserve.executor.workers.group import WorkerGroup, WorkersDied
from nanoserve.executor.workers.messages import Answered, FromWorker, Ready, RunPlan, WorkerStart
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.scheduler.plan import Row, StepPlan
from nanoserve.utils.threads import processor_name_and_flags

_CONTEXT, _STEPS = 16, 10  # of the scheduler that is timed
_MESSAGES = 10
# that steps depend on
_SETTINGS = ("dtype", "quantization", "block_size", "eager", "batch_invariant")


def measure_layouts(
    resolved: ResolvedModel,
    config: EngineConfig,
    devices: int,
    progress: ProgressCallback | None = None,
    *,
    anew: bool = False,
) -> LayoutProfile:
    """Measure every layout of `devices` workers on the CPU, or read an earlier measurement from the
    user's cache. Measuring takes about 10 seconds, in workers of its own, before anything else is
    loaded.

    The cache is neither read nor written if `anew`, nor under torchrun, whose link has no name. A
    measurement is not kept if layers or operators were not compiled yet, or if other programs
    disturbed it. The config's layouts and policy do not matter. Raises UsageError for a GPU, for a
    model with recurrent states or canvases, and what starting workers raises.
    """
    if config.device != "cpu":
        raise UsageError(
            f"layouts are measured on the CPU, not on {config.device}: choose --device cpu"
        )
    config, model, path = _kept(resolved, config, devices)
    for refuse in (refuse_states, refuse_canvases):
        refuse(model, "measuring layouts", "name a layout, as in --pp 2, and a policy")
    measure = partial(_measured, resolved, config, model)
    path = None if anew else path
    return kept_or_measured(
        LayoutProfile, path, measure, progress, lambda found: found.built and found.steady
    )


def kept_layouts(resolved: ResolvedModel, config: EngineConfig) -> LayoutProfile | None:
    """Read the measurement that `measure_layouts` kept for as many workers; None if there is
    none."""
    path = _kept(resolved, config, config.num_workers)[-1] if config.device == "cpu" else None
    with suppress(UsageError):  # it is not there, or damaged
        return None if path is None else read_profile(path, LayoutProfile)
    return None


def _kept(
    resolved: ResolvedModel, config: EngineConfig, devices: int
) -> tuple[EngineConfig, ModelConfig, Path | None]:
    """Return the settings that matter to the measurement, the model's config, and the file that
    keeps the result; the file is None under torchrun."""
    settings = {name: getattr(config, name) for name in _SETTINGS}
    config = EngineConfig(**settings, pipeline_parallel=devices)
    model = read_config(resolved, config.quantization)
    if TorchrunProcess.from_environment() is not None:
        return config, model, None
    dtype = resolve_dtype(config.dtype, torch.device("cpu"), model.dtype)
    machine = processor_name_and_flags()[0], os.environ.get("OMP_NUM_THREADS")
    return config, model, kept_file(LayoutProfile, machine, step_shape(model), str(dtype), config)


def _measured(resolved: ResolvedModel, config: EngineConfig, model: ModelConfig) -> LayoutProfile:
    last = config.num_workers - 1
    group = WorkerGroup(
        WorkerStart(model=resolved, config=config, measures=True), model, host_blocks=0
    )

    def heard() -> Iterator[FromWorker]:
        while True:
            yield from group.hear(None)

    def message_seconds(rows: int) -> float:
        plan = StepPlan(0, rows=tuple(Row(number, 0, (0,), sample=True) for number in range(rows)))
        began = time.perf_counter()
        group.send(RunPlan(plan), [last])
        next(message for message in heard() if isinstance(message, Answered))
        return time.perf_counter() - began

    try:
        ready = (
            message for message in heard() if isinstance(message, Ready) and message.rank == last
        )
        profile = next(message.layouts for message in ready if message.layouts is not None)
        beside = [
            median(message_seconds(rows) for _ in range(_MESSAGES))
            + median(map(sum, measure_scheduler(rows, context=_CONTEXT, steps=_STEPS)))
            for rows in profile.step.sizes
        ]
    except WorkersDied as death:
        raise death.error or RuntimeFailure(f"{death} while it was measuring") from None
    finally:
        group.end()
    seconds = tuple(map(sum, zip(profile.step.seconds, beside, strict=True)))
    step = MeasuredCurve(sizes=profile.step.sizes, seconds=seconds, low=seconds, high=seconds)
    return msgspec.structs.replace(profile, step=step)
