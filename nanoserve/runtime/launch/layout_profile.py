"""measure_layouts: the profile of so many worker processes, one that was kept or a new one."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from statistics import median

import msgspec
import torch

from nanoserve import __version__
from nanoserve.config import ModelConfig
from nanoserve.costs.curves import MeasuredCurve
from nanoserve.costs.layout_profile import LAYOUT_SCHEMA, LayoutProfile, read_layout_profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.processes.files import replace_file
from nanoserve.processes.threads import physical_cores, processor_name_and_flags
from nanoserve.runtime.launch.model_loading import read_config
from nanoserve.runtime.launch.rendezvous import TorchrunProcess
from nanoserve.runtime.launch.start_profile import STAGE, profile_file, step_shape
from nanoserve.runtime.profiling.scheduler_cost import measure_scheduler
from nanoserve.scheduler.plan import Row, StepPlan

_CONTEXT, _STEPS = 16, 10  # of the scheduler that is timed
_MESSAGES = 10


def measure_layouts(
    resolved: ResolvedModel,
    config: EngineConfig,
    devices: int,
    progress: ProgressCallback | None = None,
    *,
    anew: bool = False,
) -> LayoutProfile:
    """What every layout of this many workers on the CPU takes: measured by workers of their own in about 10 seconds,
    before anything else is loaded, or as an earlier call kept it in the user's cache, unless it is wanted `anew`.

    Nothing is kept under torchrun, whose link has no name, nor while layers or operators are not compiled yet, nor if
    other programs disturbed. The config's layouts and policy do not matter. Raises UsageError for a GPU, and what
    starting workers raises.
    """
    if config.device != "cpu":
        raise UsageError(f"layouts are measured on the CPU, not on {config.device}: choose --device cpu")
    config = EngineConfig(
        dtype=config.dtype,
        quantization=config.quantization,
        block_size=config.block_size,
        eager=config.eager,
        batch_invariant=config.batch_invariant,
        pipeline_parallel=devices,
    )
    model = read_config(resolved, config.quantization)
    path, dtype = None, resolve_dtype(config.dtype, torch.device("cpu"), model.dtype)
    if TorchrunProcess.from_environment() is None:
        versions, (processor, _) = (LAYOUT_SCHEMA, __version__, str(torch.__version__)), processor_name_and_flags()
        threads = physical_cores(), os.environ.get("OMP_NUM_THREADS")
        uncompiled = config.eager, config.batch_invariant, config.block_size
        path = profile_file(versions, processor, step_shape(model), str(dtype), devices, threads, uncompiled)
    if path is not None and not anew:
        with suppress(UsageError):  # it is not there, or damaged
            return read_layout_profile(path)
    tell = progress or (lambda *_: None)
    tell(STAGE, 0, 1)
    profile = _measured(resolved, config, model)
    tell(STAGE, 1, 1)
    if path is not None and profile.built and profile.steady:
        with suppress(RuntimeFailure):  # the next start measures again
            replace_file(path, msgspec.json.encode(profile))
    return profile


def _measured(resolved: ResolvedModel, config: EngineConfig, model: ModelConfig) -> LayoutProfile:
    # ZeroMQ is for workers alone.
    from nanoserve.runtime.workers.group import WorkerGroup, WorkersDied
    from nanoserve.runtime.workers.messages import Answered, FromWorker, Ready, RunPlan, WorkerStart

    start = WorkerStart(
        name=resolved.name,
        model_directory=None if resolved.directory is None else str(resolved.directory),
        tokenizer_directory=str(resolved.tokenizer_directory),
        config=config,
        measures=True,
    )
    last = config.num_workers - 1
    group = WorkerGroup(start, model, host_blocks=0)

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
        ready = (message for message in heard() if isinstance(message, Ready) and message.rank == last)
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
