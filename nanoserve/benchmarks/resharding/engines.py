"""The workers that the benchmark starts: with both layouts, and with each of them alone."""

from collections.abc import Callable
from dataclasses import replace

from nanoserve.assembly import make_predictors
from nanoserve.benchmarks.pipeline.engines import compile_layers
from nanoserve.benchmarks.resharding.policies import Workers
from nanoserve.config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.models.hub import ResolvedModel
from nanoserve.runtime.moves.host_pool import choose_host_blocks
from nanoserve.runtime.workers.executor import WorkersExecutor

Progress = Callable[[str, int, int], None]


def open_pair(resolved: ResolvedModel, config: EngineConfig, model: ModelConfig, progress: Progress | None) -> Workers:
    """Start workers that change between two layouts, and wait until their layers are compiled.

    Raises:
        NanoserveError: if they cannot run.
    """
    return _open(" -> ".join(layout.name for layout in config.layouts), resolved, config, model, progress)


def open_alone(
    resolved: ResolvedModel, config: EngineConfig, layout: int, model: ModelConfig, progress: Progress | None
) -> Workers:
    """Start workers that have but one of the two layouts.

    Raises:
        NanoserveError: if they cannot run.
    """
    only = config.layouts[layout]
    alone = replace(
        config,
        pipeline_parallel=only.pipeline_parallel,
        tensor_parallel=only.tensor_parallel,
        decode_layout=None,
        host_kv_memory=None,
    )
    return _open("own workers", resolved, alone, model, progress)


def _open(
    name: str, resolved: ResolvedModel, config: EngineConfig, model: ModelConfig, progress: Progress | None
) -> Workers:
    host_blocks = choose_host_blocks(model, config)
    executor = WorkersExecutor(
        resolved, config, model=model, host_blocks=host_blocks, progress=progress, observe_times=True
    )
    if not config.eager:
        compile_layers(executor)
    return Workers(
        name=name,
        executor=executor,
        layouts=config.layouts,
        capacities=executor.capacities,
        predictors=tuple(make_predictors(executor.speeds, model, config)),
        host_blocks=host_blocks,
        host_link_bandwidth=None if executor.speeds is None else executor.speeds.host_link_bandwidth,
        compiled=executor.layers.loaded,
        close=executor.close,
    )
