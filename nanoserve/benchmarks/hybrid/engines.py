"""The engine that all policies run on in turn: one device, host memory, and a CPU that attends there."""

from dataclasses import fields, replace

import torch

from nanoserve.benchmarks.hybrid.cases import HybridCases
from nanoserve.benchmarks.hybrid.policies import HybridEngine
from nanoserve.config import ModelConfig
from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.costs.measured_times import MeasuredTimes
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.llm import LLM
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.runtime.host.host_attention import HostAttentionLost
from nanoserve.runtime.launch.measuring_speeds import measure_speeds
from nanoserve.runtime.launch.memory import kv_bytes_per_block
from nanoserve.runtime.launch.start_profile import StartingEngine, hybrid_predictor, measure_shortly
from nanoserve.runtime.local import LocalExecutor


def open_engine(
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    work: HybridCases,
    progress: ProgressCallback | None,
) -> HybridEngine:
    """Open an engine with memory for the largest case, wait until its layers are compiled, and have its profile.

    Raises:
        NanoserveError: if it cannot run, or this machine cannot be profiled.
    """
    sized = _with_memory_for(work, config, model)
    source = resolved.name if resolved.directory is None else resolved.directory  # found once, not looked up again
    llm = LLM(source, progress=progress, **{field.name: getattr(sized, field.name) for field in fields(sized)})
    try:
        llm.prepare(progress)
        return _profiled(llm, sized, progress)
    except BaseException:
        llm.close()
        raise


def _with_memory_for(work: HybridCases, config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The settings, with KV blocks that hold everything on both sides; on the host, fewer if they say so."""
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    size = kv_bytes_per_block(model, config.block_size, dtype)
    return replace(
        config,
        kv_cache_memory=work.device_blocks(work.longest) * size,
        host_kv_memory=config.host_kv_memory or work.host_blocks(work.longest) * size,
    )


def _profiled(llm: LLM, config: EngineConfig, progress: ProgressCallback | None) -> HybridEngine:
    """With the profile that such an engine makes at its start, of layers as they run now: compiled, if they are."""
    executor = llm.engine.executor
    assert isinstance(executor, LocalExecutor), "one device in this process"
    runner, processor = executor.runner, executor.stage.processor
    assert processor is not None, "the policy that it was opened with attends on the host"
    starting = StartingEngine(
        runner=runner,
        processor=processor,
        config=config,
        max_model_len=llm.max_model_len,
        speeds=measure_speeds(runner.device, runner.decoder.dtype),
        compiled=llm.compiled,
    )
    predictor = hybrid_predictor(starting, progress)
    if predictor is None:
        raise RuntimeFailure("without a profile of this machine the CPU would never be asked to attend")

    def measure_times() -> MeasuredTimes:
        if config.profile is not None:
            return MeasuredTimes(predictor.profile)
        try:
            return MeasuredTimes(measure_shortly(starting, starting.sizes()))
        except HostAttentionLost as reason:
            raise RuntimeFailure(f"nothing can be measured: attention on the CPU is lost: {reason}") from reason

    return HybridEngine(
        executor=executor,
        host_blocks=llm.engine.scheduler.host_pool.num_blocks,
        max_model_len=llm.max_model_len,
        measure_times=measure_times,
        predictor=predictor,
        make_predictor=lambda: CorrectedPredictor(predictor),
        host_threads=processor.threads,
        compiled=llm.compiled,
        close=llm.close,
    )
