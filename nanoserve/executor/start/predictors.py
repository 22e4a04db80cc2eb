"""Predictors of an engine's policy and its drafting, measured while the engine starts."""

from collections.abc import Sequence
from pathlib import Path

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.costs.counts import Precision
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.layout_profile import LayoutProfile
from nanoserve.costs.predictor import MeasuredPredictor, layout_predictors
from nanoserve.costs.profile import Profile, read_profile
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.profiling.layout_profile import kept_layouts
from nanoserve.executor.profiling.measuring_speeds import measure_speeds
from nanoserve.executor.profiling.start_profile import StartingEngine, hybrid_profile
from nanoserve.executor.stage import Stage
from nanoserve.layout import ParallelLayout
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.scheduler.predictor import Predictor


def check_profile(path: str) -> None:
    """Raise UsageError if the file holds no profile: before anything is loaded."""
    read_profile(Path(path), Profile)


class DevicePredictors:
    """The predictors of an engine on one device of this process. The device's speeds are measured
    at once, while it has nothing else to do."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.speeds = measure_speeds(device, dtype)

    def of(
        self,
        stage: Stage,
        config: EngineConfig,
        model: ModelConfig,
        processor: HostProcessor | None,
        progress: ProgressCallback | None,
    ) -> Sequence[Predictor]:
        """By layout. Raises UsageError if the profile that is given is of something else."""
        if processor is None:
            return make_predictors(self.speeds, model, config)
        starting = StartingEngine(
            stage=stage, config=config, model=model, speeds=self.speeds, processor=processor
        )
        return hybrid_predictors(hybrid_profile(starting, progress))


def worker_predictors(
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    speeds: MachineSpeeds | None,
    profile: Profile | None,
) -> Sequence[Predictor]:
    """The predictors of an engine on workers, by layout, from what they measured."""
    if config.attends_on_host:
        return hybrid_predictors(profile)
    return make_predictors(speeds, model, config, kept_layouts(resolved, config))


def make_predictors(
    speeds: MachineSpeeds | None,
    model: ModelConfig,
    config: EngineConfig,
    measured: LayoutProfile | None = None,
) -> Sequence[Predictor]:
    """Predictors of steps and moves, by layout: from what was ``measured`` of the layouts, else
    from speeds; none where these were not measured."""
    if speeds is None:
        return ()
    dtype = resolve_dtype(config.dtype, torch.device(config.device), model.dtype)
    machine, precision = (
        speeds.machine(devices=config.num_workers),
        Precision.of(8 * dtype.itemsize),
    )

    def costs(layout: ParallelLayout) -> StepCosts:
        return (
            StepCosts(model, machine, layout, precision)
            if measured is None
            else measured.costs(model, layout)
        )

    predictors = layout_predictors([*map(costs, config.layouts)])
    # How many draft tokens pay hangs on small differences between steps: these are learned while
    # they run.
    return (
        predictors if config.speculate is None else [CorrectedPredictor(one) for one in predictors]
    )


def hybrid_predictors(profile: Profile | None) -> Sequence[Predictor]:
    """The predictor of a policy that attends in host memory; none without a profile."""
    return () if profile is None else (CorrectedPredictor(MeasuredPredictor(profile)),)
