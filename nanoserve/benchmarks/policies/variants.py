"""What is compared: policies on engines that are open. No torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from nanoserve.benchmarks.policies.baselines import DecodePrioritizing, PrefillPrioritizing
from nanoserve.benchmarks.policy_names import named_policy
from nanoserve.config import ModelConfig
from nanoserve.costs.predictor import Predictor
from nanoserve.engine_config import EngineConfig
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.plan import Executor, LayoutCapacity
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.pipeline import TieredTimes

RESHARDING: dict[str, type[TransitionMinimizing]] = {
    "prefill-prioritizing": PrefillPrioritizing,
    "decode-prioritizing": DecodePrioritizing,
    "transition-minimizing": TransitionMinimizing,
}
"""Ways of changing between two layouts (Seesaw, figures 2 and 6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngine:
    """An engine that is ready; it is started once for all runs."""

    name: str
    """Name that tells it from the others."""
    executor: Executor
    layouts: tuple[ParallelLayout, ...] = (ParallelLayout(),)
    capacities: tuple[LayoutCapacity, ...]
    """One entry per layout."""
    predictors: tuple[Predictor, ...] = ()
    """Uncorrected predictors of steps, one per layout; empty where the policies need none."""
    workers: int = 0
    """Processes that compute and report their times; 0 if this process computes."""
    host_blocks: int = 0
    """KV blocks in host memory."""
    host_link_bandwidth: float | None = None
    """Measured bandwidth of one worker to or from host memory, in bytes per second; None if not measured."""
    host_threads: int = 0
    """CPU threads that compute attention in host memory."""
    compiled: bool
    """Whether its layers run compiled."""
    simulated: bool = True
    """Whether the simulator has a model of it."""
    measure_times: Callable[[], TieredTimes] | None = None
    """Measures what things take now, for the simulator; None if the simulator takes the times of each run's record."""
    close: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVariant:
    """A policy on an engine."""

    policy: str
    place: str
    """Name of the engine or the layouts; empty if all variants share them."""
    engine: OpenEngine
    first: int
    """The engine's number of the layout in which runs begin."""
    layouts: tuple[ParallelLayout, ...]
    """Layouts by the scheduler's numbers: one, or those of prompts and of decodes."""
    make_scheduler: Callable[[], Scheduler]
    make_simulated: Callable[[], Scheduler]
    """Makes a scheduler for the simulator, whose predictors never learn."""

    @property
    def name(self) -> str:
        """Name that its metrics are filed under."""
        return ", ".join(filter(None, (self.policy, self.place)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """Settings that all schedulers share. Prompts are random, so no prefixes are cached."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    """Most tokens of a step."""

    @classmethod
    def of(cls, engines: Sequence[OpenEngine], config: EngineConfig, model: ModelConfig) -> "Scheduling":
        """The settings of these engines; the longest sequence is one that all of them hold."""
        blocks = [capacity.num_blocks for engine in engines for capacity in engine.capacities]
        blocks += [engine.host_blocks for engine in engines if len(engine.layouts) > 1]
        longest = config.max_model_len or model.max_position_embeddings
        return cls(
            block_size=config.block_size,
            max_model_len=min(longest, min(blocks) * config.block_size),
            max_num_seqs=config.max_num_seqs,
            token_budget=config.max_num_batched_tokens,
        )

    def variant(
        self,
        policy: str,
        place: str,
        engine: OpenEngine,
        capacities: Sequence[LayoutCapacity],
        *,
        first: int = 0,
        host_blocks: int = 0,
        predictors: Sequence[Predictor] = (),
        simulated_predictors: Sequence[Predictor] | None = None,
    ) -> PolicyVariant:
        """A policy on an engine.

        Args:
            policy: name, perhaps with parameters.
            place: what its name says beside the policy.
            capacities: of the layouts that the scheduler knows, which are the engine's from ``first`` on.
            simulated_predictors: for the scheduler of the simulator, if they are others.
        """
        make = partial(self._scheduler, policy, capacities, host_blocks)
        return PolicyVariant(
            policy=policy,
            place=place,
            engine=engine,
            first=first,
            layouts=engine.layouts[first : first + len(capacities)],
            make_scheduler=partial(make, predictors, feeds_tokens=engine.executor.feeds_tokens),
            make_simulated=partial(make, predictors if simulated_predictors is None else simulated_predictors),
        )

    def _scheduler(
        self,
        policy: str,
        capacities: Sequence[LayoutCapacity],
        host_blocks: int,
        predictors: Sequence[Predictor],
        *,
        feeds_tokens: bool = False,
    ) -> Scheduler:
        kind, (first, *others) = RESHARDING.get(policy), capacities
        return Scheduler(
            kind(self.token_budget) if kind else named_policy(policy, self.token_budget),
            num_blocks=first.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=False,
            pipeline_depth=first.pipeline_depth,
            host_blocks=host_blocks,
            other_layouts=others,
            predictors=predictors,
            feeds_tokens=feeds_tokens,
        )
