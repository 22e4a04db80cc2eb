"""choose_settings: the layout and the policy that the user left open, by what is measured and predicted."""

from dataclasses import replace

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs import StepCosts
from nanoserve.engine_config import AUTO, EngineConfig, layout_settings
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.request import ExpectedLengths
from nanoserve.runtime.launch.layout_profile import measure_layouts
from nanoserve.runtime.launch.rendezvous import TorchrunProcess, on_one_machine
from nanoserve.simulator.advice import choice_text, choose, usual_work
from nanoserve.simulator.planning import CacheLimits, PlannedWork


def choose_settings(
    resolved: ResolvedModel,
    config: EngineConfig,
    model: ModelConfig,
    progress: ProgressCallback | None = None,
    expected: ExpectedLengths | None = None,
) -> tuple[EngineConfig, str]:
    """The config with the layout and policy that it leaves open chosen, and the choice in one line.

    Measures on as many workers for at most 10 s, unless an earlier start kept the result. Expected requests count as a
    closed batch, without any the usual ones come at a rate. Raises UsageError if the number of workers is not known or
    nothing fits, and what starting workers raises.
    """
    layouts = config.whole_layouts if config.parallel is None else ()
    if layouts and (len(layouts) > 1 or config.num_workers == 1):
        # With KV memory on the host, hybrid itself predicts every step; pairs have one policy.
        policy = "hybrid" if len(layouts) == 1 and config.host_kv_memory is not None else config.policy_name
        return replace(config, policy=policy), f"{policy}: no other policy suits this layout"
    process = TorchrunProcess.from_environment()
    there = config.devices if process is None else process.world_size
    devices = layouts[0].devices if layouts else config.devices or there
    if devices is None:
        raise UsageError("--parallel auto: say by --devices how many workers the model may be divided over")
    given = None if config.policy == AUTO else config.policy
    settled = replace(config, parallel=None, devices=None, policy=given)
    profile = measure_layouts(resolved, settled, devices, progress)

    def costs_of(layout: ParallelLayout) -> StepCosts:
        if process is not None and layout.devices < devices:
            raise UsageError("under torchrun whole engines are not chosen: say --dp instead")
        return profile.costs(model, layout)

    longest = config.max_model_len or model.max_position_embeddings
    shapes = expected(longest) if expected is not None else ()
    work = PlannedWork(tuple(shapes)) if shapes else usual_work(costs_of, devices, longest)
    host_bytes = config.host_kv_memory if process is None or on_one_machine(process) else 0  # pairs share a pool
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
