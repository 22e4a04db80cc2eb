"""Chooses the layout and the policy that the user left open, by what is measured and predicted
(SettingsChooser)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.hardware import Efficiency, MachineSpeeds
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import AUTO, EngineConfig, layout_settings
from nanoserve.errors import UsageError
from nanoserve.executor.profiling.layout_profile import measure_layouts
from nanoserve.executor.start.memory import available_memory, kv_bytes_per_block
from nanoserve.executor.start.model_loading import with_cache_groups
from nanoserve.executor.start.rendezvous import TorchrunProcess, on_one_machine
from nanoserve.lab.simulator.advice import advise, choice_text, choose, usual_work
from nanoserve.lab.simulator.planning import CacheLimits, PlannedWork
from nanoserve.layout import ParallelLayout
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.record.counters import EngineStatus
from nanoserve.request import ExpectedLengths, RequestShape


def _devices(
    config: EngineConfig, layouts: tuple[ParallelLayout, ...], process: TorchrunProcess | None
) -> int:
    """Return how many workers the model may be divided over. Raises UsageError if nothing says."""
    if layouts:
        return layouts[0].devices
    if config.devices is not None:
        return config.devices
    if process is not None:
        return process.world_size
    raise UsageError(
        "--parallel auto: say by --devices how many workers the model may be divided over"
    )


def choose_settings(
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    progress: ProgressCallback | None = None,
    expected: ExpectedLengths | None = None,
) -> tuple[EngineConfig, str]:
    """See `SettingsChooser`. Measures on as many workers for at most 10 s, unless an earlier start
    kept the result."""
    layouts: tuple[ParallelLayout, ...] = ()
    if config.parallel is None:
        layouts = config.whole_layouts
    if layouts and (len(layouts) > 1 or config.num_workers == 1):
        policy = config.policy_name  # pairs have one policy
        if len(layouts) == 1 and config.host_kv_memory is not None:
            policy = "hybrid"  # with KV memory on the host it predicts every step itself
        return replace(config, policy=policy), f"{policy}: no other policy suits this layout"
    process = TorchrunProcess.from_environment()
    devices = _devices(config, layouts, process)
    given = config.policy
    if given == AUTO:
        given = None
    settled = replace(config, parallel=None, devices=None, policy=given)
    profile = measure_layouts(resolved, settled, devices, progress)

    def costs_of(layout: ParallelLayout) -> StepCosts:
        if process is not None and layout.devices < devices:
            raise UsageError("under torchrun whole engines are not chosen: say --dp instead")
        return profile.costs(model, layout)

    longest = config.max_model_len or model.max_position_embeddings
    shapes: Sequence[RequestShape] = ()
    if expected is not None:
        shapes = expected(longest)
    if shapes:
        work = PlannedWork(tuple(shapes))
    else:
        work = usual_work(costs_of, devices, longest)
    host_bytes = config.host_kv_memory
    if process is not None and not on_one_machine(process):
        host_bytes = 0  # pairs share a pool
    ranked = choose(
        costs_of,
        devices,
        work,
        limits=CacheLimits(device_bytes=config.kv_cache_memory, host_bytes=host_bytes),
        layouts=layouts,
        policy=given,
        token_budget=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    chosen = layout_settings(ranked[0].layouts) | {"policy": ranked[0].policy}
    return replace(settled, **chosen), choice_text(ranked, work.rate)


def advise_on_batch(
    model: ModelConfig,
    config: EngineConfig,
    speeds: MachineSpeeds,
    status: EngineStatus,
    layouts: Sequence[ParallelLayout],
    shapes: Sequence[RequestShape],
) -> str:
    """See `SettingsChooser`."""
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    item_bytes, block = (
        dtype.itemsize,
        kv_bytes_per_block(with_cache_groups(model, config), config.block_size, dtype),
    )
    device_bytes, host_bytes = (
        status.total_blocks * block / config.data_parallel,
        status.total_host_blocks * block,
    )
    precision, usable = Precision.of(8 * item_bytes), Efficiency().usable_memory
    # Memory is what the engines hold, and on CPUs also what is free: workers have taken all they
    # can of a GPU's.
    devices, host = config.data_parallel * config.num_workers, available_memory("cpu")
    weights = ModelCounts(model, precision=precision).stage_weight_bytes(0)
    memory = (weights + device_bytes) / config.num_workers
    if config.device == "cpu":
        memory += host / devices
    machine = speeds.machine(
        devices=devices,
        memory_bytes=memory / usable,
        host_memory_bytes=(host + weights + host_bytes) / usable,
    )
    try:
        return advise(
            partial(StepCosts, model, machine, precision=precision),
            layouts,
            PlannedWork(tuple(shapes)),
            limits=CacheLimits(device_bytes=device_bytes, host_bytes=host_bytes),
            token_budget=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
    except UsageError as error:
        return f"nothing can be predicted: {error}"
