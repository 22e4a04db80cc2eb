"""The engines that comparisons open: groups of workers, and processes that compute alone."""

from dataclasses import fields, replace
from typing import Literal

import torch

from nanoserve.assembly import make_predictors
from nanoserve.benchmarks.policies.cases import KvCases
from nanoserve.benchmarks.policies.variants import OpenEngine
from nanoserve.config import ModelConfig
from nanoserve.costs.measured_times import MeasuredPredictor, MeasuredTimes
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.llm import LLM
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.runtime.host.host_attention import HostAttentionLost
from nanoserve.runtime.launch.measuring_speeds import measure_speeds
from nanoserve.runtime.launch.memory import kv_bytes_per_block
from nanoserve.runtime.launch.start_profile import StartingEngine, hybrid_profile, measure_shortly
from nanoserve.runtime.local import LocalExecutor
from nanoserve.runtime.moves.host_pool import choose_host_blocks
from nanoserve.runtime.workers.executor import WorkersExecutor
from nanoserve.scheduler.plan import LayoutCapacity


def open_workers(
    name: str,
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    progress: ProgressCallback | None,
    *,
    metadata: Literal["decoupled", "coupled"] = "decoupled",
    simulated: bool = True,
) -> OpenEngine:
    """Start workers of one layout or two, and wait until their layers are compiled.

    Raises:
        NanoserveError: if they cannot run.
    """
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
    try:
        if not config.eager:
            executor.layers.start(waited=True)
            executor.layers.wait()
    except BaseException:
        executor.close()
        raise
    return OpenEngine(
        name=name,
        executor=executor,
        layouts=config.layouts,
        capacities=executor.capacities,
        predictors=tuple(make_predictors(executor.speeds, model, config)),
        workers=config.num_workers,
        host_blocks=host_blocks,
        host_link_bandwidth=None if executor.speeds is None else executor.speeds.host_link_bandwidth,
        compiled=executor.layers.loaded,
        simulated=simulated,
        close=executor.close,
    )


def open_one_process(
    name: str, resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None
) -> OpenEngine:
    """Open the model undivided in this process, with all of its threads.

    Raises:
        NanoserveError: if it cannot run.
    """
    alone = replace(config, pipeline_parallel=1, tensor_parallel=1, pipeline_split=None, trace=None)
    llm = _prepared_llm(resolved, alone, progress)
    return OpenEngine(
        name=name,
        executor=llm.engine.executor,
        capacities=(LayoutCapacity(llm.engine.scheduler.pool.num_blocks),),
        compiled=llm.compiled,
        simulated=False,
        close=llm.close,
    )


def open_with_host(
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    work: KvCases,
    progress: ProgressCallback | None,
) -> OpenEngine:
    """Open a profiled engine of one device and a CPU that attends in host memory; both hold the largest case.

    Raises:
        NanoserveError: if it cannot run, or this machine cannot be profiled.
    """
    size = kv_bytes_per_block(
        model, config.block_size, resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    )
    sized = replace(
        config,
        kv_cache_memory=work.device_blocks(work.longest) * size,
        host_kv_memory=config.host_kv_memory or work.host_blocks(work.longest) * size,
    )
    llm = _prepared_llm(resolved, sized, progress)
    try:
        return _profiled(llm, sized, progress)
    except BaseException:
        llm.close()
        raise


def _prepared_llm(resolved: ResolvedModel, config: EngineConfig, progress: ProgressCallback | None) -> LLM:
    source = resolved.name if resolved.directory is None else resolved.directory  # found once, not looked up again
    llm = LLM(source, progress=progress, **{field.name: getattr(config, field.name) for field in fields(config)})
    try:
        llm.prepare(progress)
    except BaseException:
        llm.close()
        raise
    return llm


def _profiled(llm: LLM, config: EngineConfig, progress: ProgressCallback | None) -> OpenEngine:
    """An engine with the profile that it makes at its start; its layers run now as they run in the benchmark."""
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor), "one device in this process"
    runner, processor = executor.runner, executor.stage.processor
    assert processor is not None, "the policy that it was opened with attends on the host"
    starting = StartingEngine(
        runner=runner,
        processor=processor,
        config=config,
        model=llm.config,
        speeds=measure_speeds(runner.device, runner.decoder.dtype),
        compiled=llm.compiled,
    )
    profile = hybrid_profile(starting, progress)
    if profile is None:
        raise RuntimeFailure("without a profile of this machine the CPU would never be asked to attend")

    def measure_times() -> MeasuredTimes:
        if config.profile is not None:
            return MeasuredTimes(profile)
        try:
            return MeasuredTimes(measure_shortly(starting, starting.sizes()))
        except HostAttentionLost as reason:
            raise RuntimeFailure(f"nothing can be measured: attention on the CPU is lost: {reason}") from reason

    return OpenEngine(
        name="device and CPU",
        executor=executor,
        capacities=(LayoutCapacity(llm.engine.scheduler.pool.num_blocks),),
        predictors=(MeasuredPredictor(profile),),
        host_blocks=llm.engine.scheduler.host_pool.num_blocks,
        host_threads=processor.threads,
        compiled=llm.compiled,
        measure_times=measure_times,
        close=llm.close,
    )
