"""The engines that the pipeline's benchmark opens: groups of workers, and one process that computes alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from nanoserve.config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.llm import LLM
from nanoserve.models.hub import ResolvedModel
from nanoserve.runtime.launch.model_loading import read_config
from nanoserve.runtime.workers.executor import WorkersExecutor
from nanoserve.scheduler.plan import Executor

Metadata = Literal["decoupled", "coupled"]
ONE_PROCESS = "one process"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An executor that is ready, started once for all runs."""

    name: str
    """What tells it from the others."""
    executor: Executor
    num_blocks: int
    """That its KV cache has."""
    workers: int
    """Processes that compute and say what they do; 0 where this one computes."""
    tensor_parallel: int
    """Workers of a stage."""
    compiled: bool
    """Whether its layers run compiled."""
    simulated: bool
    """Whether the simulator has a model of it: several stages that plans are sent ahead to."""
    close: Callable[[], None]


def workers_name(config: EngineConfig, metadata: Metadata) -> str:
    """As tables call a group of workers: "pp=2 tp=2 coupled"."""
    degrees = [("pp", config.pipeline_parallel), ("tp", config.tensor_parallel)]
    words = [f"{name}={degree}" for name, degree in degrees if degree > 1] or ["pp=1"]
    return " ".join([*words, *(["coupled"] if metadata == "coupled" else [])])


def open_workers(
    resolved: ResolvedModel, config: EngineConfig, metadata: Metadata, progress: Progress | None
) -> OpenEngine:
    """Start workers and wait until their layers are compiled.

    Raises:
        NanoserveError: if they cannot run.
    """
    executor = WorkersExecutor(
        resolved,
        config,
        model=read_config(resolved),
        progress=progress,
        metadata=metadata,
        observe_times=True,
    )
    if not config.eager:
        compile_layers(executor)
    return OpenEngine(
        name=workers_name(config, metadata),
        executor=executor,
        num_blocks=executor.num_blocks,
        workers=config.num_workers,
        tensor_parallel=config.tensor_parallel,
        compiled=executor.layers.loaded,
        simulated=metadata == "decoupled" and config.pipeline_parallel > 1,
        close=executor.close,
    )


def compile_layers(executor: WorkersExecutor) -> None:
    """Wait until its workers have compiled layers; where that ends otherwise, they end, too.

    Raises:
        NanoserveError: if they cannot run.
    """
    try:
        executor.layers.start(waited=True)
        executor.layers.wait()
    except BaseException:
        executor.close()
        raise


def open_one_process(resolved: ResolvedModel, config: EngineConfig, progress: Progress | None) -> OpenEngine:
    """The same model, undivided, in this process, with all of its threads.

    Raises:
        NanoserveError: if it cannot run.
    """
    alone = replace(config, pipeline_parallel=1, tensor_parallel=1, pipeline_split=None, trace=None)
    source = resolved.name if resolved.directory is None else resolved.directory  # found once, not looked up again
    llm = LLM(source, progress=progress, **{field.name: getattr(alone, field.name) for field in fields(alone)})
    try:
        llm.prepare(progress)
    except BaseException:
        llm.close()
        raise
    return OpenEngine(
        name=ONE_PROCESS,
        executor=llm.engine.executor,
        num_blocks=llm.engine.scheduler.pool.num_blocks,
        workers=0,
        tensor_parallel=1,
        compiled=llm.compiled,
        simulated=False,
        close=llm.close,
    )


def common_context(engines: Sequence[OpenEngine], config: EngineConfig, model: ModelConfig) -> tuple[int, int]:
    """KV blocks that every engine has, and tokens of the longest sequence that these hold."""
    num_blocks = min(engine.num_blocks for engine in engines)
    longest = config.max_model_len or model.max_position_embeddings
    return num_blocks, min(longest, num_blocks * config.block_size)
