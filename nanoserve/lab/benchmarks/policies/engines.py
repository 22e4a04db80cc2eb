"""The engines that comparisons open, until ``opened`` ends. All raise NanoserveError where they
cannot run."""

from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.layout_profile import LayoutProfile
from nanoserve.costs.predictor import MeasuredPredictor
from nanoserve.costs.profile import MeasuredTimes
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.cpu_attention.cpu_attention import CpuAttention
from nanoserve.executor.cpu_attention.host_attention import HostAttentionLost
from nanoserve.executor.kv_transfer.host_pool import choose_host_blocks
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.profiling.layout_profile import kept_layouts, measure_layouts
from nanoserve.executor.profiling.measuring_speeds import measure_speeds
from nanoserve.executor.profiling.start_profile import (
    StartingEngine,
    hybrid_profile,
    measure_shortly,
)
from nanoserve.executor.start.memory import kv_bytes_per_block
from nanoserve.executor.start.model_loading import (
    check_canvas_settings,
    check_state_settings,
    with_cache_groups,
)
from nanoserve.executor.start.predictors import make_predictors
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.lab.benchmarks.policies.variants import KvCases, OpenEngine
from nanoserve.llm import LLM
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.scheduler.optional import LayoutCapacity


def open_workers(
    opened: ExitStack,
    name: str,
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    progress: ProgressCallback | None,
    *,
    metadata: Literal["decoupled", "coupled"] = "decoupled",
    simulated: bool = True,
    predicted: bool = False,
) -> OpenEngine:
    """Workers of one layout or two, whose layers are compiled; their costs are measured first if
    runs are to be `predicted`."""
    check_state_settings(config, model)
    check_canvas_settings(config, model)
    profile: LayoutProfile | None = None
    costs: tuple[StepCosts, ...] = ()
    if predicted:
        profile = measure_layouts(resolved, config, config.num_workers, progress, anew=True)
        costs = tuple(profile.costs(model, layout) for layout in config.layouts)
    model = with_cache_groups(model, config)
    host_blocks = choose_host_blocks(model, config)
    executor = WorkersExecutor(
        resolved,
        config,
        model=model,
        host_blocks=host_blocks,
        progress=progress,
        metadata=metadata,
        observe_times=True,
    )
    opened.callback(executor.close)
    if not config.eager:
        executor.layers.start(waited=True)
        executor.layers.wait()
    predictors = make_predictors(
        executor.speeds, model, config, profile or kept_layouts(resolved, config)
    )
    link: float | None = None
    if executor.speeds is not None:
        link = executor.speeds.host_link_bandwidth
    return OpenEngine(
        name=name,
        executor=executor,
        vocab_size=model.vocab_size,
        layouts=config.layouts,
        capacities=executor.capacities,
        windows=executor.windows,
        state_slots=executor.state_slots,
        predictors=tuple(predictors),
        workers=config.num_workers,
        host_blocks=host_blocks,
        host_link_bandwidth=link,
        compiled=executor.layers.loaded,
        costs=costs,
        simulated=simulated,
    )


def open_one_process(
    opened: ExitStack,
    name: str,
    resolved: ResolvedModel,
    config: EngineConfig,
    progress: ProgressCallback | None,
) -> OpenEngine:
    """Open the model undivided in this process, with all of its threads."""
    alone = replace(config, pipeline_parallel=1, tensor_parallel=1, pipeline_split=None, trace=None)
    return _of_llm(name, _open(opened, resolved, alone, progress), simulated=False)


def open_with_host(
    opened: ExitStack,
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    work: KvCases,
    progress: ProgressCallback | None,
) -> OpenEngine:
    """Open an engine of one device and a CPU that attends in host memory, with the profile that it
    makes at its start. Both hold the largest case."""
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    size = kv_bytes_per_block(model.in_one_group(), config.block_size, dtype)
    host_bytes = config.host_kv_memory or work.host_blocks(work.longest) * size
    sized = replace(
        config,
        kv_cache_memory=work.device_blocks(work.longest) * size,
        host_kv_memory=host_bytes,
        # this memory need not hold a request of the model's whole context
        max_model_len=work.longest.total_tokens,
    )
    llm = _open(opened, resolved, sized, progress)
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor), "one device in this process"
    speeds = measure_speeds(executor.runner.device, executor.runner.decoder.dtype)
    processor = next(
        each.processor for each in executor.stage.mechanisms if isinstance(each, CpuAttention)
    )
    starting = StartingEngine(
        stage=executor.stage,
        config=sized,
        model=llm.built.model,
        speeds=speeds,
        processor=processor,
    )
    profile = hybrid_profile(starting, progress)
    if profile is None:
        raise RuntimeFailure(
            "without a profile of this machine the CPU would never be asked to attend"
        )
    host = llm.engine.scheduler.extensions.host
    assert host is not None, "the engine has host memory"

    def measure_times() -> MeasuredTimes:
        if config.profile is not None:
            return MeasuredTimes(profile)
        try:
            return MeasuredTimes(measure_shortly(starting, starting.sizes()))
        except HostAttentionLost as reason:
            raise RuntimeFailure(
                f"nothing can be measured: attention on the CPU is lost: {reason}"
            ) from reason

    return replace(
        _of_llm("device and CPU", llm),
        predictors=(MeasuredPredictor(profile),),
        host_blocks=host.pool.num_blocks,
        host_threads=starting.processor.threads,
        measure_times=measure_times,
    )


def _open(
    opened: ExitStack,
    resolved: ResolvedModel,
    config: EngineConfig,
    progress: ProgressCallback | None,
) -> LLM:
    source: str | Path = resolved.name
    if resolved.directory is not None:
        source = resolved.directory  # found once, not looked up again
    llm = LLM(
        source,
        progress=progress,
        **{field.name: getattr(config, field.name) for field in fields(config)},
    )
    opened.callback(llm.close)
    llm.built.prepare(progress)
    return llm


def _of_llm(name: str, llm: LLM, *, simulated: bool = True) -> OpenEngine:
    state = llm.engine.scheduler.extensions.state
    return OpenEngine(
        name=name,
        executor=llm.engine.executor,
        vocab_size=llm.built.model.vocab_size,
        capacities=(LayoutCapacity(llm.engine.scheduler.pool.num_blocks),),
        windows=llm.built.model.cache_groups.windows,
        state_slots=0 if state is None else state.pool.num_slots,
        compiled=llm.built.compiled,
        simulated=simulated,
    )
